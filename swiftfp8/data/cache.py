"""Token rows kept between runs (`data.cache=true`), under a key of all that they are made from.

The key sees the files (path, size, time of change), every option that changes tokens, the
tokenizer and its template, and the versions of the libraries: where any of it differs, another
file is read. A file that is damaged is made anew, with a note. Files hold arrays and JSON, nothing
that runs when it is read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftfp8 import __version__
from swiftfp8.config.paths import cache_dir
from swiftfp8.data.report import PartReport, SourceReport
from swiftfp8.data.sources import entry_files, registered_datasets

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

log = logging.getLogger(__name__)
_LAYOUT = 2  # of the files, and of how rows become tokens: raise it where either changes
_LIBRARIES = ("transformers", "tokenizers", "jinja2")
_OPTIONS = ("dataset", "val_dataset", "split_dataset_ratio", "seed", "task", "max_length", "system")
_DATA_OPTIONS = (
    "format",
    "columns",
    "truncation",
    "loss_scale",
    "loss_weights",
    "on_bad_row",
    "interleave_prob",
    "stopping_strategy",
)


@dataclass(frozen=True, kw_only=True)
class KeptPart:
    """Rows one after the other, as `TokenRows` holds them, and what was told of them."""

    ids: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    report: PartReport
    weights: np.ndarray | None = None


Parts = Mapping[str, KeptPart]


class TokenCache:
    """The file of one key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Parts | None:
        """The parts that were kept, or None where there are none that can be used."""
        if not self.path.is_file():
            return None
        try:
            with np.load(self.path, allow_pickle=False) as kept:
                parts = {name: _part(kept, name) for name in json.loads(str(kept["parts"]))}
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            log.warning(
                "the kept tokens in %s can't be read (%s): they are made anew", self.path, error
            )
            return None
        return parts

    def write(self, parts: Parts) -> bool:
        """Keep the parts, and say whether; a disk that is full costs the cache, not the run."""
        arrays: dict[str, Any] = {"parts": json.dumps(list(parts))}
        for name, part in parts.items():
            arrays |= {
                f"{name}.ids": part.ids,
                f"{name}.labels": part.labels,
                f"{name}.lengths": part.lengths,
                f"{name}.report": json.dumps(asdict(part.report)),
            }
            if part.weights is not None:
                arrays[f"{name}.weights"] = part.weights
        begun = self.path.with_name(f"{self.path.stem}.{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with begun.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(begun, self.path)
        except OSError as error:
            log.warning("tokens can't be kept in %s: %s", self.path, error)
            begun.unlink(missing_ok=True)
            return False
        return True


def token_cache(config: Config, tokenizer: Any) -> TokenCache | None:
    """The cache of a job's rows, or None where it has none; why not is logged where it was asked.

    Raises what reading the entries raises: a file that isn't there.
    """
    if not config.data.cache:
        return None
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        log.warning("tokens are not kept: %s tells nothing of itself", type(tokenizer).__name__)
        return None
    files: list[Any] = []
    entries = (*config.dataset, *config.val_dataset)
    for entry in entries:
        found = entry_files(entry)
        if found is None:
            log.warning("tokens are not kept: whether '%s' changed can't be told here", entry)
            return None
        files.append([_state(path) for path in found])
    known = registered_datasets()
    template = str(tokenizer.chat_template)
    made_from = {
        "layout": _LAYOUT,
        "versions": [__version__, *map(version, _LIBRARIES)],
        "options": {name: getattr(config, name) for name in _OPTIONS},
        "data": {name: getattr(config.data, name) for name in _DATA_OPTIONS},
        "files": files,
        "registered": [repr(known.get(entry.split("#")[0])) for entry in entries],
        "tokenizer": hashlib.sha256(core.to_str().encode()).hexdigest(),
        "special": {name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        "template": template,
        "day": str(date.today()) if "strftime_now" in template else None,
    }
    said = json.dumps(made_from, sort_keys=True, default=list).encode("utf-8", "surrogatepass")
    return TokenCache(cache_dir() / "tokens" / f"{hashlib.sha256(said).hexdigest()[:32]}.npz")


def _state(path: Path) -> Sequence[Any]:
    found = path.stat()
    return [str(path.resolve()), found.st_size, found.st_mtime_ns]


def _part(kept: Any, name: str) -> KeptPart:
    report = json.loads(str(kept[f"{name}.report"]))
    sources = tuple(SourceReport(**source) for source in report.pop("sources"))
    part = KeptPart(
        ids=kept[f"{name}.ids"],
        labels=kept[f"{name}.labels"],
        lengths=kept[f"{name}.lengths"],
        report=PartReport(sources=sources, **report),
        weights=kept.get(f"{name}.weights"),
    )
    sizes = {len(a) for a in (part.ids, part.labels, part.weights) if a is not None}
    if not len(part.lengths) or sizes != {int(part.lengths.sum())}:
        raise ValueError("its arrays don't fit together")
    return part

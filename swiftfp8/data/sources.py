"""Where rows come from: a registered name, a file, a folder of files, or a hub.

Local files are read here rather than by `datasets`, because a fault must be shown with its file
and line, which `datasets` forgets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from swiftfp8.config.paths import assets_dir, configs_dir
from swiftfp8.data import files, hubs
from swiftfp8.data.files import BadPlace
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.registry import suggest, unknown


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """Rows of one file or hub data set. `lines[i]` is the line where row i begins, if known."""

    entry: str
    where: str
    rows: Sequence[Mapping[str, Any]]
    lines: Sequence[int] | None = None
    bad: tuple[BadPlace, ...] = ()
    format: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def place(self, index: int) -> str:
        """`file:line`, or `name, row N` where lines mean nothing (parquet, hubs)."""
        if self.lines is None:
            return f"{self.where}, row {index + 1}"
        return f"{self.where}:{self.lines[index]}"


@dataclass(frozen=True, kw_only=True)
class RegisteredDataset:
    """A file of `configs/dataset/`: where its rows are, how they are laid out, whose they are."""

    name: str
    source: str
    description: str
    licence: str
    format: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    subset: str | None = None
    split: str = "train"

    @property
    def hub_id(self) -> tuple[str, str | None, str]:
        """Id, subset and split of one that lies on a hub."""
        return self.source, self.subset, self.split


def no_rows(entry: str, where: str) -> SwiftFP8Error:
    """The error for an entry of `dataset` that is empty."""
    return SwiftFP8Error(
        f"data set '{entry}' has no rows",
        where=where,
        fix="write one row a line into it, or leave it out of the data sets",
    )


def read_entry(entry: str, *, hub: str, seed: int) -> list[RowSet]:
    """The rows of one entry of `dataset`, `#N` sampling done.

    Raises:
        SwiftFP8Error: unknown name, missing or unreadable file, no rows.
    """
    name, wanted = _split_sample(entry)
    registered = registered_datasets().get(name)
    if registered is not None:
        found = [_labelled(rows, registered) for rows in _read_registered(registered, hub)]
    else:
        found = _read_place(name, hub)
    found = [replace(rows, entry=entry) for rows in found]
    if not any(len(rows.rows) or rows.bad for rows in found):
        raise no_rows(entry, found[0].where)
    return found if wanted is None else _sample(found, wanted, seed)


def entry_files(entry: str) -> list[Path] | None:
    """The files that an entry is read from; None where it lies on a hub.

    Raises SwiftFP8Error where they are missing, as read_entry does.
    """
    name, _ = _split_sample(entry)
    registered = registered_datasets().get(name)
    if registered is not None:
        path = local_path(registered)
        return None if path is None else _local_files(path)
    return _local_files(Path(name).expanduser()) if _is_local(name) else None


def registered_datasets() -> dict[str, RegisteredDataset]:
    """Every `configs/dataset/<name>.yaml`, by name."""
    known: dict[str, RegisteredDataset] = {}
    for path in sorted((configs_dir() / "dataset").glob("*.yaml")):
        try:
            known[path.stem] = RegisteredDataset(
                name=path.stem, **yaml.safe_load(path.read_text(encoding="utf-8"))
            )
        except (TypeError, yaml.YAMLError) as error:
            raise SwiftFP8Error(
                f"a data set's file can't be read: {error}",
                where=str(path),
                fix="it holds: source, description, licence; optional: format columns subset split",
            ) from error
    return known


def _split_sample(entry: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.+)#(\d+)", entry)
    if match is None:
        return entry, None
    if int(match[2]) == 0:
        raise SwiftFP8Error(f"'{entry}' asks for 0 rows", fix="write a number from 1 on after #")
    return match[1], int(match[2])


def local_path(dataset: RegisteredDataset) -> Path | None:
    """Where a registered data set lies on this disk; None for one of a hub."""
    if dataset.source.startswith("assets/"):
        return assets_dir().parent / dataset.source
    beside = configs_dir() / "dataset" / dataset.source
    if beside.exists():
        return beside
    return Path(dataset.source).expanduser() if _is_local(dataset.source) else None


def _read_registered(dataset: RegisteredDataset, hub: str) -> list[RowSet]:
    path = local_path(dataset)
    if path is not None:
        return _read_local(path)
    rows = hubs.read_hub(*dataset.hub_id, hub)
    return [RowSet(entry=dataset.name, where=dataset.source, rows=rows)]


def _labelled(rows: RowSet, dataset: RegisteredDataset) -> RowSet:
    return replace(rows, format=dataset.format, columns=dataset.columns)


def _read_place(name: str, hub: str) -> list[RowSet]:
    """A path, or a hub id `owner/name[:subset][@split]`."""
    if _is_local(name):
        return _read_local(Path(name).expanduser())
    if "/" not in name:
        raise unknown("data set", name, registered_datasets(), where="dataset")
    rows = hubs.read_hub(*hub_id(name), hub)
    return [RowSet(entry=name, where=name, rows=rows)]


def hub_id(name: str) -> tuple[str, str | None, str]:
    """Id, subset and split of `owner/name:subset@split`."""
    whole, _, split = name.partition("@")
    owner_and_name, _, subset = whole.partition(":")
    return owner_and_name, subset or None, split or "train"


def _is_local(name: str) -> bool:
    """Whether a name means a path, existing or not: hub ids have one slash and no suffix."""
    path = Path(name).expanduser()
    return (
        path.exists()
        or files.suffix_of(path) in files.READERS
        or name.startswith((".", "~", "/"))
        or name.count("/") > 1
    )


def _read_local(path: Path) -> list[RowSet]:
    return [_read_file(file) for file in _local_files(path)]


def _local_files(path: Path) -> list[Path]:
    """The file, or every file of a known kind in a folder."""
    if path.is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file() and files.readable(p))
        if not inside:
            raise SwiftFP8Error(
                "the folder holds no file of a known kind",
                where=str(path),
                fix=f"known: {' '.join(files.READERS)}",
            )
        return inside
    if not path.exists():
        raise _missing(path)
    return [path]


def _read_file(path: Path) -> RowSet:
    content = files.read_file(path)
    return RowSet(
        entry=str(path),
        where=str(path),
        rows=content.rows,
        lines=content.lines,
        bad=content.bad,
    )


def _missing(path: Path) -> SwiftFP8Error:
    folder = path.parent
    if not folder.is_dir():
        return SwiftFP8Error(
            "no such file: its folder does not exist", where=str(path), fix="correct the path"
        )
    close = suggest(path.name, [file.name for file in folder.iterdir()])
    fix = f"did you mean {folder / close}?" if close else f"look into {folder}"
    return SwiftFP8Error("no such file", where=str(path), fix=fix)


def _sample(found: list[RowSet], wanted: int, seed: int) -> list[RowSet]:
    """`wanted` rows drawn without repetition by `seed`, in their order; all where there are fewer.

    Lines that can't be read are left out of a sample: they could not have been drawn.
    """
    everything = [(k, i) for k, rows in enumerate(found) for i in range(len(rows.rows))]
    if wanted < len(everything):
        everything = sorted(random.Random(seed).sample(everything, wanted))
    chosen: list[RowSet] = []
    for k, rows in enumerate(found):
        kept = [i for where, i in everything if where == k]
        lines = None if rows.lines is None else [rows.lines[i] for i in kept]
        if kept:
            picked = [rows.rows[i] for i in kept]
            chosen.append(replace(rows, rows=picked, lines=lines, bad=()))
    return chosen

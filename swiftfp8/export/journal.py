"""What an interrupted export has finished, so that a second attempt can go on from there.

Beside the shards in a staging directory lies the journal, one JSON object a line:

    {"fingerprint": {...}}                                       what the export is made of
    {"shard": NAME, "bytes": N, "sha256": HEX, "layers": [...]}  one for each complete shard

A shard is reused where the fingerprint is the same and the file still has the size and the hash
that were noted when its last byte was written. The journal is removed before the directory gets
its name: where it lies, an export is not finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from swiftfp8 import __version__
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate import Calibration
from swiftfp8.export.checkpoint_io import read_header, shard_files
from swiftfp8.export.layout import LayerError, Layout
from swiftfp8.export.source import Source
from swiftfp8.export.staging import partial_directories

JOURNAL_NAME = "unfinished_export.jsonl"
_READ = 1 << 22
_LAYOUT = "what becomes of the tensors"

Fingerprint = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Shard:
    bytes: int
    sha256: str
    layers: tuple[LayerError, ...]


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """What an interrupted export has left: its directory and its complete shards.

    `journal` is open, and keeps every other export out of the directory until it is closed.
    """

    directory: Path
    shards: Mapping[str, _Shard]
    journal: IO[str] = field(compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the complete shards."""
        return sum(shard.bytes for shard in self.shards.values())


def fingerprint(
    source: Source,
    layout: Layout,
    options: Mapping[str, Any],
    calibration: Calibration | None,
) -> Fingerprint:
    """What decides an export's bytes, by names that a user understands.

    A source shard counts by its size, the time it was changed and the hash of its header: reading
    it whole would take as long as exporting it.
    """
    found = {"swiftfp8": __version__}
    found |= {f"export.{name}": json.dumps(value) for name, value in options.items()}
    found["config.json of the model"] = _hash_json(source.layers.config)
    for file in shard_files(source.directory):
        found[f"the model's {file.name}"] = _source_file(file)
    adapter = source.checkpoint.adapter
    for name in ("adapter_config.json", "adapter_model.safetensors") if adapter else ():
        assert adapter is not None
        found[f"the adapter's {name}"] = _hash_file(adapter.directory / name)
    tensors = [[spec.name, spec.dtype, *spec.shape] for spec in layout.tensors]
    found[_LAYOUT] = _hash_json([layout.format, tensors, layout.config])
    if layout.input_amax is not None:
        found["measured input scales"] = _hash_json(layout.input_amax)
    if layout.kv_amax is not None:
        found["measured scales of the cache"] = _hash_json(layout.kv_amax)
    if calibration is not None:  # the same figures for every layer: the same rounding
        found["calibrated rounding"] = _hash_json(asdict(calibration))
    return found


def find_unfinished(target: Path, wanted: Fingerprint) -> tuple[Unfinished | None, str]:
    """What can be reused of earlier attempts at `target`, and what to tell the user.

    Raises:
        SwiftFP8Error: an earlier attempt is still running, or was made of something else.
    """
    left: Unfinished | None = None
    said = "there is no interrupted export to resume: exporting from the start"
    different: list[tuple[Path, Fingerprint]] = []
    for directory in partial_directories(target):
        journal = _open_locked(directory)
        if journal is None:
            continue
        noted, shards = _read(directory / JOURNAL_NAME)
        if shards and noted != wanted:
            journal.close()
            different.append((directory, noted))
            continue
        good = {name: s for name, s in shards.items() if _is_intact(directory / name, s)}
        found = Unfinished(directory=directory, shards=good, journal=journal)
        if good:
            _release(left)
            size = f"{found.nbytes / 2**30:.2f} GiB"
            return found, f"resuming: {len(good)} finished file(s), {size}, are kept"
        if (directory / JOURNAL_NAME).exists():
            _release(left)
            left = found
            said = f"nothing in {directory.name} can be reused: exporting from the start"
        else:  # finished, or removed, just now
            journal.close()
    if different:
        _release(left)
        directory, noted = different[0]
        raise SwiftFP8Error(
            f"the interrupted export was made of something else: {_difference(noted, wanted)}",
            where=str(directory),
            fix="give the same options and files again, or remove that directory to start anew",
        )
    return left, said


def unfinished_hint(target: Path) -> str | None:
    """A line about an interrupted export that the user did not ask to resume."""
    for directory in partial_directories(target):
        shards = _read(directory / JOURNAL_NAME)[1]
        if shards and not _is_locked(directory):
            return (
                f"an interrupted export with {len(shards)} finished file(s) is in {directory}: "
                "export.resume=true goes on with it"
            )
    return None


class ExportJournal:
    """The journal of an export that is being written; use as a context manager.

    What `unfinished` holds is kept; everything else in `directory` is removed first.
    """

    def __init__(
        self, directory: Path, made_of: Fingerprint, unfinished: Unfinished | None = None
    ) -> None:
        self._path = directory / JOURNAL_NAME
        self._made_of = made_of
        self._shards = dict(unfinished.shards) if unfinished else {}
        self.reused = len(self._shards)
        self._pending: list[LayerError] = []
        self._file = unfinished.journal if unfinished else _new_journal(directory)
        for path in directory.iterdir():
            if path.is_file() and path.name not in (*self._shards, JOURNAL_NAME):
                path.unlink()

    @property
    def layers(self) -> Mapping[str, LayerError]:
        """Layers by name whose cost is known, of this and earlier attempts."""
        shards = self._shards.values()
        return {layer.name: layer for shard in shards for layer in shard.layers}

    def finished(self, file: str) -> bool:
        """Whether the shard of this name is complete already."""
        return file in self._shards

    def measured(self, layer: LayerError) -> None:
        """Note a layer; it is kept with the next shard that is complete."""
        self._pending.append(layer)

    def add(self, file: str, nbytes: int, sha256: str) -> None:
        """Note that a shard is complete."""
        shard = _Shard(bytes=nbytes, sha256=sha256, layers=tuple(self._pending))
        self._pending.clear()
        self._shards[file] = shard
        self._append(file, shard)

    def close(self) -> None:
        """Remove the journal: everything is written and checked."""
        self._path.unlink()

    def __enter__(self) -> ExportJournal:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({"fingerprint": dict(self._made_of)}) + "\n")
        for name, shard in self._shards.items():
            self._append(name, shard)
        self._file.flush()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _append(self, name: str, shard: _Shard) -> None:
        self._file.write(json.dumps({"shard": name, **asdict(shard)}) + "\n")
        self._file.flush()


def _read(path: Path) -> tuple[Fingerprint, dict[str, _Shard]]:
    """A journal; a line that was cut off while it was written ends it, nothing is an empty one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        made_of = dict(json.loads(lines[0])["fingerprint"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return {}, {}
    shards: dict[str, _Shard] = {}
    for line in lines[1:]:
        try:
            entry = json.loads(line)
            layers = tuple(
                LayerError(**{**layer, "shape": tuple(layer["shape"])}) for layer in entry["layers"]
            )
            shards[entry["shard"]] = _Shard(
                bytes=entry["bytes"], sha256=entry["sha256"], layers=layers
            )
        except (ValueError, KeyError, TypeError):
            break
    return made_of, shards


def _difference(noted: Fingerprint, wanted: Fingerprint) -> str:
    """Options with their values, files by name; the layout only where nothing explains it."""
    names = [name for name in {**noted, **wanted} if noted.get(name) != wanted.get(name)]
    names = [name for name in names if name != _LAYOUT] or names
    said = []
    for name in names[:5]:
        if name.startswith("export.") or name == "swiftfp8":
            said.append(f"{name} was {noted.get(name, 'not given')}, is {wanted.get(name, '-')}")
        else:
            said.append(f"{name} has changed")
    return "; ".join(said) + (f"; and {len(names) - 5} more" if len(names) > 5 else "")


def _is_intact(file: Path, shard: _Shard) -> bool:
    return (
        file.is_file() and file.stat().st_size == shard.bytes and _hash_file(file) == shard.sha256
    )


def _source_file(file: Path) -> str:
    status = file.stat()
    header = [[s.name, s.dtype, *s.shape, offset] for s, offset in read_header(file)]
    return f"{status.st_size} {status.st_mtime_ns} {_hash_json(header)}"


def _hash_file(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(_READ):
            digest.update(chunk)
    return digest.hexdigest()


def _hash_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    assert isinstance(value, Iterable), value
    return list(value)


def _new_journal(directory: Path) -> IO[str]:
    """An empty journal that is locked before anybody can find it under its name."""
    unnamed = directory / f"{JOURNAL_NAME}.new"
    file = unnamed.open("x", encoding="utf-8")
    _lock(file.fileno())
    unnamed.rename(directory / JOURNAL_NAME)
    return file


def _open_locked(directory: Path) -> IO[str] | None:
    """The journal of an interrupted export, locked; None where there is none.

    Raises:
        SwiftFP8Error: another export has the lock.
    """
    try:
        file = (directory / JOURNAL_NAME).open("r+", encoding="utf-8")
    except FileNotFoundError:
        return None
    if _lock(file.fileno()):
        return file
    file.close()
    raise SwiftFP8Error(
        "another export is writing to this directory now",
        where=str(directory),
        fix="wait for it, or choose another export_dir",
    )


def _release(unfinished: Unfinished | None) -> None:
    if unfinished:
        unfinished.journal.close()


def _is_locked(directory: Path) -> bool:
    try:
        with (directory / JOURNAL_NAME).open("r+") as handle:
            return not _lock(handle.fileno())
    except FileNotFoundError:
        return False


def _lock(handle: int) -> bool:
    """Take the lock that ends with its process; False where another one has it.

    A file system without locks counts as not locked: the lock only guards against two exports to
    one directory at the same time.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True

"""Safetensors read and written a few rows at a time, so that no model has to fit in memory.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape,
byte range) and the bytes. Shapes and types of an export are known before its first byte is
computed, so headers are written first and tensors follow in order, in pieces.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# What safetensors knows besides; no weight that can be exported has one of them.
_NOT_READ = frozenset({"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "U16", "U32", "U64", "C64"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MAX_HEADER = 100 << 20


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, safetensors dtype and shape of a stored tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return DTYPES[self.dtype]

    @property
    def columns(self) -> int:
        """Elements of one index of the first axis (1 for a scalar)."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first axis (of the whole, for a scalar)."""
        return self.columns * self.torch_dtype.itemsize

    @property
    def rows(self) -> int:
        """Length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class _Place:
    file: Path
    offset: int


class CheckpointReader:
    """The tensors of a Hugging Face directory: `specs` in file order, and any rows of them.

    `files` are read in place of the directory's own shards. Several threads may read at once.

    Raises:
        SwiftFP8Error: no safetensors, a missing shard, a truncated or damaged file.
    """

    def __init__(self, directory: Path, files: Sequence[Path] | None = None) -> None:
        self.directory = directory
        self.specs: dict[str, TensorSpec] = {}
        self._places: dict[str, _Place] = {}
        self._open: dict[Path, io.FileIO] = {}
        self._opening = threading.Lock()
        for file in shard_files(directory) if files is None else files:
            self._add(file)

    def rows(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Rows [start, stop) of a tensor on `device`, in its stored dtype, freshly allocated."""
        spec, place = self.specs[name], self._places[name]
        count = (spec.rows if stop is None else stop) - start
        pinned = torch.device(device).type == "cuda"
        buffer = torch.empty(count * spec.row_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._read(place.file, as_buffer(buffer), place.offset + start * spec.row_bytes)
        shape = (count, *spec.shape[1:]) if spec.shape else ()
        return buffer.to(device, non_blocking=True).view(spec.torch_dtype).view(shape)

    def close(self) -> None:
        """Close the files that are open."""
        with self._opening:
            for handle in self._open.values():
                handle.close()
            self._open.clear()

    def _read(self, file: Path, into: memoryview, offset: int) -> None:
        with self._opening:
            if file not in self._open:
                self._open[file] = file.open("rb", buffering=0)
            handle = self._open[file].fileno()
        done = 0
        while done < len(into):
            count = os.preadv(handle, [into[done:]], offset + done)
            if count == 0:
                raise _damaged(file, "the file ended while it was being read")
            done += count

    def _add(self, file: Path) -> None:
        for spec, offset in read_header(file):
            if spec.name in self.specs:
                raise _damaged(file, f"tensor {spec.name} is stored twice")
            self.specs[spec.name] = spec
            self._places[spec.name] = _Place(file=file, offset=offset)


class ShardJournal(Protocol):
    """Who is told of finished shards, and knows those that an earlier attempt finished."""

    def finished(self, file: str) -> bool:
        """Whether the shard of this name is complete already."""

    def add(self, file: str, nbytes: int, sha256: str) -> None:
        """Note that a shard is complete."""


class CheckpointWriter:
    """Writes tensors, in the order of `specs`, as shards of at most `max_shard_bytes`.

    A tensor may come in several pieces of rows. Use as a context manager: leaving it in good
    order writes the index. One shard becomes `model.safetensors` without an index. What belongs
    to a shard that `journal` knows as finished may come or not, and is not written again.
    """

    def __init__(
        self,
        directory: Path,
        specs: Sequence[TensorSpec],
        max_shard_bytes: int,
        journal: ShardJournal | None = None,
    ) -> None:
        self.directory = directory
        self._shards = split_shards(specs, max_shard_bytes)
        self._all = [(n, spec) for n, shard in enumerate(self._shards) for spec in shard]
        self._journal = journal
        there = {n for n in range(len(self._shards)) if self._is_finished(n)}
        self._there = {spec.name for n, spec in self._all if n in there}
        self._todo = [(n, spec) for n, spec in self._all if n not in there]
        self._next = 0
        self._missing_bytes = 0
        self._shard = -1
        self._file: io.FileIO | None = None
        self._sum = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "swiftfp8-hash")

    def has(self, names: Iterable[str]) -> bool:
        """Whether all of these tensors are in shards that were finished before."""
        return self._there.issuperset(names)

    def write(self, name: str, piece: Tensor) -> None:
        """Append a piece of tensor `name`."""
        if name in self._there:
            return
        if self._missing_bytes == 0:
            self._begin(name)
        _, spec = self._todo[self._next - 1]
        assert spec.name == name and spec.torch_dtype == piece.dtype, (spec, name, piece.dtype)
        raw = piece.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        assert raw.numel() <= self._missing_bytes, f"{name}: more bytes than its shape has"
        self._put(as_buffer(raw))
        self._missing_bytes -= raw.numel()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hasher.shutdown()
        if kind is None:
            assert self._missing_bytes == 0 and self._next == len(self._todo), "tensors missing"
            self._finish()
            self._write_index()
        elif self._file:
            self._file.close()

    def _begin(self, name: str) -> None:
        shard, spec = self._todo[self._next]
        assert spec.name == name, f"expected {spec.name}, got {name}"
        self._next += 1
        self._missing_bytes = spec.nbytes
        if shard != self._shard:
            self._finish()
            self._shard = shard
            self._file = (self.directory / self._shard_name(shard)).open("wb", buffering=0)
            self._sum = hashlib.sha256()
            self._put(memoryview(_header_bytes(self._shards[shard])))

    def _put(self, raw: memoryview) -> None:
        """Write and hash at the same time."""
        assert self._file is not None
        hashed = self._hasher.submit(self._sum.update, raw) if self._journal else None
        done = 0
        while done < len(raw):
            done += self._file.write(raw[done:])
        if hashed:
            hashed.result()

    def _finish(self) -> None:
        """Close the shard that is open, if one is, and note it."""
        if self._file is None:
            return
        size = self._file.tell()
        self._file.close()
        self._file = None
        if self._journal:
            self._journal.add(self._shard_name(self._shard), size, self._sum.hexdigest())

    def _is_finished(self, shard: int) -> bool:
        return self._journal is not None and self._journal.finished(self._shard_name(shard))

    def _shard_name(self, shard: int) -> str:
        if len(self._shards) == 1:
            return SINGLE_NAME
        return f"model-{shard + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _write_index(self) -> None:
        if len(self._shards) == 1:
            return
        weight_map = {spec.name: self._shard_name(shard) for shard, spec in self._all}
        total = sum(spec.nbytes for _, spec in self._all)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (self.directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def shard_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, by its index where it has one."""
    index = directory / INDEX_NAME
    if index.is_file():
        names = _indexed_files(index)
        missing = [name for name in names if not (directory / name).is_file()]
        if missing or not names:
            raise SwiftFP8Error(
                f"weights are missing: {', '.join(missing) or 'the index lists none'}",
                where=str(index),
                fix="download or copy the model again",
            )
        return [directory / name for name in names]
    single = directory / SINGLE_NAME
    if not single.is_file():
        raise SwiftFP8Error(
            "no safetensors weights here",
            where=str(directory),
            fix=f"give a Hugging Face model directory with {SINGLE_NAME} or {INDEX_NAME}",
        )
    return [single]


def read_header(file: Path) -> list[tuple[TensorSpec, int]]:
    """Tensors of a safetensors file with their absolute byte offsets, in file order."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise _damaged(file, "the header is cut off")
        try:
            header = json.loads(handle.read(length))
        except (ValueError, RecursionError) as error:
            raise _damaged(file, "the header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(file, "the header is not a JSON object")
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    found = [_entry(file, name, entry, 8 + length) for name, entry in entries]
    found.sort(key=lambda pair: (pair[1], pair[0].nbytes))
    end = 8 + length
    for spec, offset in found:
        if offset != end:
            kind = "overlaps the tensor before it" if offset < end else "has a gap before it"
            raise _damaged(file, f"tensor {spec.name} {kind}")
        end += spec.nbytes
    if end != size:
        raise _damaged(file, f"{size} bytes long where its header says {end}")
    return found


def split_shards(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Tensors in order, a new shard where the next tensor would exceed `max_bytes`."""
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and filled + spec.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def parse_size(text: str) -> int:
    """Bytes of '5GB', '500 MiB' or '1000000'."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    if not match or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise SwiftFP8Error(
            f"'{text}' is not a size", where="export.max_shard_size", fix="write it as 5GB or 2GiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def as_buffer(raw: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU."""
    return memoryview(cast(Any, raw.numpy()))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; SwiftFP8Error where it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SwiftFP8Error(f"can't read {path.name}: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise SwiftFP8Error(f"{path.name} is not valid JSON: {error}", where=str(path)) from error
    if not isinstance(value, dict):
        raise SwiftFP8Error(f"{path.name} does not hold a JSON object", where=str(path))
    return value


def _indexed_files(index: Path) -> list[str]:
    """The file names of an index, sorted."""
    weight_map = read_json(index).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise SwiftFP8Error(
            "weight_map is no JSON object of tensor names and file names",
            where=str(index),
            fix="download or copy the model again",
        )
    return sorted(set(weight_map.values()))


def _entry(file: Path, name: str, entry: Any, base: int) -> tuple[TensorSpec, int]:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)):
        raise _damaged(file, f"tensor {name} has no type, shape and byte range in the header")
    if dtype in _NOT_READ:
        raise SwiftFP8Error(
            f"tensor {name} has the type {dtype}, which swiftfp8 does not read",
            where=str(file),
            fix="give the BF16 model that it was made from, or FP8 with scales in float32",
        )
    if dtype not in DTYPES:
        raise _damaged(file, f"tensor {name} has the unknown type {dtype}")
    if len(offsets) != 2:
        raise _damaged(file, f"tensor {name} has {len(offsets)} data_offsets, not 2")
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape))
    start, end = offsets
    if end - start != spec.nbytes:
        raise _damaged(file, f"tensor {name} has {end - start} bytes for shape {spec.shape}")
    return spec, base + start


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _header_bytes(specs: Sequence[TensorSpec]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _damaged(file: Path, what: str) -> SwiftFP8Error:
    return SwiftFP8Error(
        f"damaged safetensors file: {what}", where=str(file), fix="download or copy the file again"
    )

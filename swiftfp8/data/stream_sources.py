"""Files and hubs read row by row, from any row on: what `data.streaming` reads.

A place in a data set is a file's index and a number of lines (of parquet and hubs, rows) in it. It
stays right where a line is mended, which a number of bytes would not.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftfp8.data.chat import Example
from swiftfp8.data.files import BadPlace, is_utf16, not_utf8, read_line, suffix_of
from swiftfp8.data.formats import Row
from swiftfp8.data.hubs import stream_hub
from swiftfp8.data.reading import Shape, find_shape
from swiftfp8.data.sources import RowSet, entry_files, hub_id, registered_datasets
from swiftfp8.errors import SwiftFP8Error

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

Place = tuple[int, int]  # a file's index, and how many of its lines were read
_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, kw_only=True)
class StreamSource:
    """One file, or one split of a hub's data set (`hub`: id, subset and split)."""

    entry: str
    where: str
    path: Path | None = None
    hub: tuple[str, str | None, str] | None = None
    format: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def rows(self, start: int) -> Iterator[tuple[int, str, Row | BadPlace]]:
        """Rows after the first `start`: how many are read with each, its place, itself.

        Raises:
            SwiftFP8Error: the file or the hub can't be read.
        """
        if self.path is None:
            assert self.hub is not None
            for number, row in enumerate(stream_hub(*self.hub, start), start=start + 1):
                yield number, f"{self.where}, row {number}", row
            return
        read = _parquet if suffix_of(self.path) == ".parquet" else _lines
        try:
            yield from read(self.path, start)
        except (OSError, EOFError) as error:
            raise SwiftFP8Error(
                f"the file can't be read: {error}",
                where=str(self.path),
                fix="copy or download it again",
            ) from error

    def shape(self, row: Row, place: str, config: Config) -> Shape:
        """How rows that begin with this one are read."""
        first = RowSet(
            entry=self.entry, where=place, rows=[row], format=self.format, columns=self.columns
        )
        return find_shape(first, config)


def stream_sources(entry: str, hub: str) -> tuple[StreamSource, ...]:
    """What an entry of `dataset` is read from.

    Raises:
        SwiftFP8Error: a missing file, or one of a kind that is read whole.
    """
    registered = registered_datasets().get(entry)
    known = {"format": registered.format, "columns": registered.columns} if registered else {}
    paths = entry_files(entry)
    if paths is None:
        if hub != "hf":
            raise SwiftFP8Error(
                f"'{entry}' can't be streamed from {hub}",
                where="data.streaming",
                fix="set hub=hf, or download it and name the files",
            )
        found = hub_id(entry) if registered is None else registered.hub_id
        return (StreamSource(entry=entry, where=found[0], hub=found, **known),)
    whole = [p for p in paths if suffix_of(p) not in (*_LINES, ".parquet")]
    if whole:
        raise SwiftFP8Error(
            f"files of kind '{suffix_of(whole[0])}' are read whole, not row by row",
            where=str(whole[0]),
            fix="write the rows as .jsonl or .parquet, or set data.streaming=false",
        )
    return tuple(StreamSource(entry=entry, where=str(p), path=p, **known) for p in paths)


def read_on(
    sources: tuple[StreamSource, ...], entry: int, config: Config, place: Place
) -> Iterator[tuple[Place, Example | BadPlace]]:
    """An entry's rows after `place`, each with the place after it, in their file's format."""
    for index in range(place[0], len(sources)):
        source = sources[index]
        start = place[1] if index == place[0] else 0
        shape = _shape(source, config) if start else None
        for number, where, row in source.rows(start):
            if isinstance(row, BadPlace):
                yield (index, number), row
                continue
            shape = shape or source.shape(row, where, config)
            yield (index, number), shape.convert(row, where, entry)


def _shape(source: StreamSource, config: Config) -> Shape | None:
    for _, where, row in source.rows(0):
        if not isinstance(row, BadPlace):
            return source.shape(row, where, config)
    return None


def _lines(path: Path, start: int) -> Iterator[tuple[int, str, Row | BadPlace]]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(islice(file, start, None), start=start + 1):
            where = f"{path}:{number}"
            if number == 1 and is_utf16(line):  # every line would be a bad row
                raise not_utf8(path, line, 0)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield number, where, BadPlace(where=where, reason=f"not UTF-8 text: {error.reason}")
                continue
            if text.strip():
                yield number, where, read_line(text, where)


def _parquet(path: Path, start: int) -> Iterator[tuple[int, str, Row | BadPlace]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        done = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if done + size > start:
                number = done
                for batch in file.iter_batches(batch_size=1024, row_groups=[group]):
                    rows: list[dict[str, Any]] = batch.to_pylist()
                    for row in rows:
                        number += 1
                        if number > start:
                            yield number, f"{path}, row {number}", row
            done += size
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise SwiftFP8Error(f"not a parquet file: {reason}", where=str(path)) from error

"""Entries of the configuration to rows in a known format; what can't be read is kept aside."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftfp8.data.chat import Example
from swiftfp8.data.files import BadPlace
from swiftfp8.data.formats import BadRow, Format, Row, choose_format, read_tools, rename
from swiftfp8.data.report import SourceReport
from swiftfp8.data.sources import RowSet, read_entry
from swiftfp8.data.task_formats import task_formats
from swiftfp8.errors import SwiftFP8Error, raise_all
from swiftfp8.registry import suggest
from swiftfp8.tasks import formats_of

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Rows that can be used, files with their formats, and bad rows; `total` counts all rows."""

    examples: list[Example]
    sources: tuple[SourceReport, ...]
    bad: list[BadPlace]
    total: int


def read_examples(entries: Sequence[str], config: Config, key: str) -> Converted:
    """Read all entries, each row in its format.

    Raises:
        SwiftFP8Error: no entries, and what read_entry raises for each, all of it together.
    """
    if not entries:
        raise SwiftFP8Error(
            "there is nothing to train on", where=key, fix="set dataset=FILE or dataset=quickstart"
        )
    with _without_collector():
        return _read(entries, config)


def _read(entries: Sequence[str], config: Config) -> Converted:
    problems: list[SwiftFP8Error] = []
    found: list[RowSet] = []
    entry_of: list[int] = []
    for index, entry in enumerate(entries):
        try:
            found += read_entry(entry, hub=config.hub, seed=config.seed)
            entry_of += [index] * (len(found) - len(entry_of))
        except SwiftFP8Error as error:
            problems.append(error)
    raise_all(problems)
    examples: list[Example] = []
    sources: list[SourceReport] = []
    bad: list[BadPlace] = []
    for index, rows in zip(entry_of, found, strict=True):
        bad += rows.bad
        if len(rows.rows):
            sources.append(_convert_rows(rows, index, config, examples, bad))
    total = sum(len(rows.rows) + len(rows.bad) for rows in found)
    return Converted(examples=examples, sources=tuple(sources), bad=bad, total=total)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Rows are many small objects that all live on: looking for garbage takes 40% of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _convert_rows(
    rows: RowSet, entry: int, config: Config, examples: list[Example], bad: list[BadPlace]
) -> SourceReport:
    shape = find_shape(rows, config)
    for index, row in enumerate(rows.rows):
        made = shape.convert(row, rows.place(index), entry)
        (bad if isinstance(made, BadPlace) else examples).append(made)  # type: ignore[arg-type]
    return shape.source


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How the rows of one file are read: the format that its first row has, renamed columns."""

    form: Format
    columns: Mapping[str, str]
    source: SourceReport

    def convert(self, row: Row, place: str, entry: int) -> Example | BadPlace:
        """The row in its format, or why it has none."""
        try:
            row = rename(row, self.columns)
            content, tools = self.form.convert(row), read_tools(row)
        except BadRow as error:
            return BadPlace(where=place, reason=str(error))
        return Example(content=content, where=place, tools=tools, entry=entry)


def find_shape(rows: RowSet, config: Config) -> Shape:
    """The shape of rows that begin with the first of these.

    Raises:
        SwiftFP8Error: no format fits, or a column to rename is not there.
    """
    columns = {**rows.columns, **config.data.columns}
    _check_columns(rows, columns)
    first = rename(rows.rows[0], columns)
    asked = config.data.format if config.data.format != "auto" else rows.format or "auto"
    formats = task_formats(formats_of(config))
    form, reason = choose_format(
        first, asked, where=rows.place(0), formats=formats, task=config.task
    )
    if asked == rows.format:
        reason = "named by the data set's file"
    source = SourceReport(
        entry=rows.entry,
        where=rows.where,
        rows=len(rows.rows) + len(rows.bad),
        format=form.name,
        reason=reason,
    )
    return Shape(form=form, columns=columns, source=source)


def _check_columns(rows: RowSet, columns: Mapping[str, str]) -> None:
    """A renamed column must be there in the first row, or its name is misspelt."""
    for name in columns:
        if name not in rows.rows[0]:
            known = [str(column) for column in rows.rows[0]]
            close = suggest(name, known)
            raise SwiftFP8Error(
                f"the first row lacks the column '{name}', which data.columns renames",
                where=rows.place(0),
                fix=f"did you mean {close}?" if close else f"its columns: {', '.join(known)}",
            )

"""JSON, JSONL, CSV, TSV, parquet and plain text, read so that each row's line is known.

A line of JSONL or CSV that can't be read is a bad row like any other, to be shown with the rest or
skipped; a JSON array that breaks off can't be read on, so that is an error at once.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error


@dataclass(frozen=True, kw_only=True)
class BadPlace:
    """A row that can't be used, where it is, and why."""

    where: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """Rows of one file; `lines[i]` is where row i begins."""

    rows: list[Mapping[str, Any]]
    lines: list[int] | None
    bad: tuple[BadPlace, ...] = ()


def read_file(path: Path) -> FileRows:
    """Read a file by its suffix, unpacking `.gz`."""
    reader = READERS.get(suffix_of(path))
    if reader is None:
        raise SwiftFP8Error(
            f"files of kind '{path.suffix}' are not read",
            where=str(path),
            fix=f"known: {' '.join(READERS)}, each but parquet also with .gz",
        )
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise not_utf8(path, error.object, error.start) from error
    except (OSError, EOFError, zlib.error) as error:
        raise SwiftFP8Error(
            f"the file can't be read: {error}", where=str(path), fix="copy or download it again"
        ) from error


def not_utf8(path: Path, data: bytes, place: int) -> SwiftFP8Error:
    """What to say of a file whose text begins with `data`; the byte at `place` is not UTF-8's."""
    likely = "utf-16" if is_utf16(data) else "latin1"
    return SwiftFP8Error(
        f"the file is not UTF-8 text: byte {place} is 0x{data[place]:02x}",
        where=str(path),
        fix=f"convert it, for instance: iconv -f {likely} -t utf-8 OLD > NEW",
    )


def is_utf16(data: bytes) -> bool:
    """Whether a file says so by its first bytes."""
    return data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))


def readable(path: Path) -> bool:
    """Whether the file is of a kind that is read; hidden files and READMEs are not."""
    return suffix_of(path) in READERS and not path.name.lower().startswith((".", "readme"))


def suffix_of(path: Path) -> str:
    """The suffix that tells the kind: `.jsonl` for `rows.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix.lower()


def _text(path: Path) -> str:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8-sig")


def _read_jsonl(path: Path) -> FileRows:
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    bad: list[BadPlace] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        row = read_line(line, f"{path}:{number}")
        if isinstance(row, BadPlace):
            bad.append(row)
        else:
            rows.append(row)
            lines.append(number)
    return FileRows(rows=rows, lines=lines, bad=tuple(bad))


def read_line(line: str, where: str) -> Mapping[str, Any] | BadPlace:
    """The row of a line of JSONL."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadPlace(where=where, reason=_malformed(error, line))
    if isinstance(row, dict):
        return row
    return BadPlace(where=where, reason=f"not a JSON object: {shorten(line)}")


def _read_json(path: Path) -> FileRows:
    """An array of objects, or objects one after the other."""
    text = _text(path)
    decoder = json.JSONDecoder()
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    bad: list[BadPlace] = []
    at = _skip(text, 0, "[")
    line, counted = 1, 0
    while at < len(text) and text[at] != "]":
        line += text.count("\n", counted, at)
        counted = at
        try:
            row, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            source = text.split("\n")[error.lineno - 1]
            raise SwiftFP8Error(
                _malformed(error, source), where=f"{path}:{error.lineno}", fix="correct the line"
            ) from error
        except (ValueError, RecursionError) as error:
            raise SwiftFP8Error(
                _malformed(error, ""), where=f"{path}:{line}", fix="correct the line"
            ) from error
        if isinstance(row, dict):
            rows.append(row)
            lines.append(line)
        else:
            reason = f"not a JSON object: {shorten(text[at:end])}"
            bad.append(BadPlace(where=f"{path}:{line}", reason=reason))
        at = _skip(text, end, ",")
    if text.lstrip().startswith("[") and at >= len(text):
        raise SwiftFP8Error(
            "malformed JSON: the array is not closed",
            where=f"{path}:{text.count(chr(10)) + 1}",
            fix="the file is cut off: fetch or write it again",
        )
    return FileRows(rows=rows, lines=lines, bad=tuple(bad))


def _skip(text: str, at: int, mark: str) -> int:
    """The next place that holds anything but blanks and `mark`, at most one of it."""
    blank = re.compile(rf"\s*{re.escape(mark)}?\s*")
    match = blank.match(text, at)
    assert match is not None
    return match.end()


def _read_csv(path: Path, delimiter: str = ",") -> FileRows:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader(io.StringIO(_text(path), newline=""), delimiter=delimiter, strict=True)
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    bad: list[BadPlace] = []
    header: list[str] | None = None
    begins = 1
    try:
        for cells in reader:
            number, begins = begins, reader.line_num + 1
            if not any(cells):
                continue
            if header is None:
                header = _header(cells, f"{path}:{number}")
                if delimiter == ",":
                    _check_commas(header, f"{path}:{number}")
            elif len(cells) != len(header):
                reason = f"{len(cells)} cells under {len(header)} columns"
                bad.append(BadPlace(where=f"{path}:{number}", reason=reason))
            else:
                rows.append(dict(zip(header, cells, strict=True)))
                lines.append(number)
    except csv.Error as error:
        raise SwiftFP8Error(
            f"malformed table: {error}", where=f"{path}:{begins}", fix="check quotes on this line"
        ) from error
    return FileRows(rows=rows, lines=lines, bad=tuple(bad))


def _check_commas(header: list[str], where: str) -> None:
    """A single column whose name holds another separator is several columns."""
    other = next((sign for sign in ";\t|" if len(header) == 1 and sign in header[0]), None)
    if other:
        raise SwiftFP8Error(
            f"the columns are separated by {other!r}, and those of a .csv file by commas",
            where=where,
            fix="save it with commas, or with tabs as a .tsv file",
        )


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = [name for place, name in enumerate(names) if name and name in names[:place]]
    if twice:
        raise SwiftFP8Error(
            f"two columns are named '{twice[0]}'", where=where, fix="rename or remove one of them"
        )
    return names


def _read_tsv(path: Path) -> FileRows:
    return _read_csv(path, delimiter="\t")


def _read_text(path: Path) -> FileRows:
    """A row for each paragraph: runs of lines with a blank line between."""
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    text = _text(path).replace("\r\n", "\n")
    line, counted = 1, 0
    for match in re.finditer(r"\S.*?(?=\n[ \t]*\n|\s*\Z)", text, flags=re.S):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        rows.append({"text": match[0]})
        lines.append(line)
    return FileRows(rows=rows, lines=lines)


def _read_parquet(path: Path) -> FileRows:
    import pyarrow
    import pyarrow.parquet

    try:
        return FileRows(rows=pyarrow.parquet.read_table(path).to_pylist(), lines=None)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise SwiftFP8Error(f"not a parquet file: {reason}", where=str(path)) from error


READERS: dict[str, Callable[[Path], FileRows]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}


def _malformed(error: ValueError | RecursionError, line: str) -> str:
    """What the parser says; of numbers too long to read and nesting too deep, it says no column."""
    if isinstance(error, RecursionError):
        return "malformed JSON: nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return f"malformed JSON: {error}"
    around = line[max(0, error.colno - 30) : error.colno + 30].strip()
    return f"malformed JSON: {error.msg} at column {error.colno}, near `{shorten(around)}`"


def shorten(text: str, width: int = 60) -> str:
    """One line of at most `width` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"

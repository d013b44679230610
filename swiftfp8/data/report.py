"""What was read, what was left out and why: counts that the run prints and keeps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swiftfp8.data.files import BadPlace
from swiftfp8.errors import SwiftFP8Error

_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """One file or hub data set: rows read, and the format found in it with the reason.

    Of a stream `rows` is None, since they are not counted.
    """

    entry: str
    where: str
    rows: int | None
    format: str
    reason: str

    def line(self) -> str:
        """One line for the terminal."""
        rows = "streamed" if self.rows is None else f"{self.rows:,} rows"
        return f"  {self.entry}: {rows}, format {self.format} ({self.reason})"

    def counted(self, rows: int) -> SourceReport:
        """The same with a number of rows."""
        return replace(self, rows=rows)


@dataclass(frozen=True, kw_only=True)
class PartReport:
    """The training or the evaluation part after tokenizing.

    `rows` counts what is trained on; `split` texts longer than `max_length` that became several
    rows; `packs` sequences of up to `pack_capacity` tokens that the rows were packed into, 0
    without packing; `mixed` how many rows each entry gave where they were mixed, and `stop` until
    when; `dropped` rows left out by length, `skipped` bad rows, both by reason. Of evaluation rows
    `known` are training rows too.
    """

    sources: tuple[SourceReport, ...]
    rows: int
    tokens: int
    trained_tokens: int
    longest: int
    truncated: int
    split: int
    dropped: dict[str, int]
    skipped: dict[str, int]
    packs: int = 0
    pack_capacity: int = 0
    mixed: dict[str, int] = field(default_factory=dict)
    stop: str = ""
    known: int = 0

    @property
    def masked_share(self) -> float:
        """Share of tokens without a loss."""
        return 1.0 - self.trained_tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """A training part that is read while the run trains, shuffled in blocks of `buffer` rows."""

    sources: tuple[SourceReport, ...]
    buffer: int

    def lines(self) -> list[str]:
        """Lines for the terminal."""
        read = f"train: read while training, {self.buffer:,} rows at a time; rows are not counted"
        return [read, *(source.line() for source in self.sources)]


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Both parts. `eval_from` says where evaluation rows come from, `cached` what a cache did."""

    train: PartReport | StreamReport
    eval: PartReport | None
    eval_from: str | None
    cached: str | None = None

    def summary_lines(self) -> list[str]:
        """A few lines of text for the terminal."""
        streamed = isinstance(self.train, StreamReport)
        lines = self.train.lines() if streamed else _part_lines("train", self.train)
        if self.eval is not None:
            lines += _part_lines(f"eval ({self.eval_from})", self.eval)
            if self.eval.known:
                lines.append(known_rows_warning(self.eval.known))
        if self.cached is not None:
            lines.append(self.cached)
        return lines


def known_rows_warning(known: int) -> str:
    """Said where evaluation rows say what training rows say."""
    rows = "1 evaluation row is a training row" if known == 1 else f"{known:,} evaluation rows are "
    rows += "" if known == 1 else "training rows"
    return f"warning: {rows} too, word for word: eval_loss is better than that of new rows"


def bad_rows_error(bad: list[BadPlace], total: int) -> SwiftFP8Error:
    """All bad rows in one error: the first ten with place and reason, and how many in all."""
    bad = in_order(bad)
    shown = [f"  {place.where}: {place.reason}" for place in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        shown.append(f"  ... and {len(bad) - _SHOWN} more")
    rows = "1 bad row" if len(bad) == 1 else f"{len(bad)} bad rows"
    return SwiftFP8Error(
        f"{rows} of {total}:\n" + "\n".join(shown),
        where=bad[0].where,
        fix="correct them, or leave them out with data.on_bad_row=skip",
    )


def in_order(bad: Sequence[BadPlace]) -> list[BadPlace]:
    """Bad rows as a reader of the files meets them: files as read, lines or rows by number."""
    files: dict[str, int] = {}

    def cut(place: BadPlace) -> tuple[str, int]:
        found = re.fullmatch(r"(.*)(?::|, row )(\d+)", place.where, re.DOTALL)
        return (found[1], int(found[2])) if found else (place.where, 0)

    for place in bad:
        files.setdefault(cut(place)[0], len(files))
    return sorted(bad, key=lambda place: (files[cut(place)[0]], cut(place)[1]))


def count_reasons(bad: list[BadPlace]) -> dict[str, int]:
    """How often each reason occurs, most frequent first; quoted parts don't tell reasons apart."""
    return dict(Counter(place.reason.split(": ")[0] for place in bad).most_common())


def _part_lines(name: str, part: PartReport) -> list[str]:
    lines = [
        f"{name}: {part.rows:,} rows, {part.tokens:,} tokens, {part.masked_share:.0%} masked, "
        f"longest {part.longest}"
    ]
    lines += [source.line() for source in part.sources]
    if part.mixed:
        given = ", ".join(f"{entry} {number:,}" for entry, number in part.mixed.items())
        lines.append(f"  mixed by data.interleave_prob ({part.stop}): {given} rows")
    if part.packs:
        full = part.tokens / (part.packs * part.pack_capacity)
        lines.append(
            f"  packed into {part.packs:,} sequences of up to {part.pack_capacity:,} tokens, "
            f"{full:.0%} full"
        )
    if part.truncated:
        lines.append(f"  {part.truncated:,} rows cut to max_length")
    if part.split:
        lines.append(f"  {part.split:,} texts over max_length go on in further rows")
    for what, counts in (("dropped", part.dropped), ("bad rows skipped", part.skipped)):
        lines += [f"  {number:,} {what}: {reason}" for reason, number in counts.items()]
    return lines

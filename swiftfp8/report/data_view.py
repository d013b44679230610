"""Prints an inspection of data: what was found, a histogram of lengths, rows with their masks.

On a terminal trained text is bold and green, and masked text dim. Elsewhere trained text stands
between ⟦ and ⟧ (or [[ and ]] where the output has no such characters). Text of another weight than
1 begins with it: x0.5.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.text import Text

from swiftfp8.data.inspect import Inspection, PartInspection, ShownRow
from swiftfp8.data.report import count_reasons

_BAR = 40
_BAD_SHOWN = 10
_ROW_CHARS = 2_000  # of a run that is shown


def print_inspection(found: Inspection, console: Console) -> None:
    """Print both parts."""
    _print_part(found.train, console)
    if found.eval is not None:
        _print_part(found.eval, console)
    if found.held:
        aside = "" if found.eval else " that split_dataset_ratio sets aside"
        share = f"{found.leaked:,} of {found.held:,} evaluation rows{aside} are training rows too"
        _line(console, share)


def _print_part(part: PartInspection, console: Console) -> None:
    _line(console, f"{part.name}: {part.rows:,} rows that can be used, of {part.total:,}")
    for source in part.sources:
        _line(
            console,
            f"  {source.entry}: {source.rows:,} rows, format {source.format} ({source.reason})",
        )
    _print_bad(part, console)
    share = part.duplicates / part.rows if part.rows else 0.0
    _line(console, f"exact duplicates: {part.duplicates:,} rows ({share:.1%})")
    for row, earlier in part.pairs:
        _line(console, f"  {row} repeats {earlier}")
    if len(part.lengths):
        _print_lengths(part, console)
    for row in part.shown:
        _print_row(row, console)


def _print_bad(part: PartInspection, console: Console) -> None:
    if not part.bad:
        _line(console, "bad rows: none")
        return
    reasons = ", ".join(f"{n:,} x {reason}" for reason, n in count_reasons(list(part.bad)).items())
    _line(console, f"bad rows: {len(part.bad):,} ({reasons})")
    for place in part.bad[:_BAD_SHOWN]:
        _line(console, f"  {place.where}: {place.reason}")
    if len(part.bad) > _BAD_SHOWN:
        _line(console, f"  ... and {len(part.bad) - _BAD_SHOWN:,} more")


def _print_lengths(part: PartInspection, console: Console) -> None:
    lengths = part.lengths
    of = "all rows" if part.sampled == part.rows else f"{part.sampled:,} rows drawn by seed"
    tokens = int(lengths.sum())
    _line(console, f"lengths in tokens, from {of}:")
    edges = _edges(int(lengths.max()))
    counts = np.histogram(lengths, edges)[0]
    mark = "█" if _unicode(console) else "#"
    width = len(f"{edges[-1] - 1:,}")
    for low, high, count in zip(edges[:-1], edges[1:], counts.tolist(), strict=True):
        bar = mark * max(round(_BAR * count / counts.max()), 1 if count else 0)
        span = f"{low:>{width},} to {high - 1:>{width},}"
        _line(console, f"  {span}  {bar:<{_BAR}} {count:,} ({count / len(lengths):.1%})")
    middle, high = np.quantile(lengths, [0.5, 0.95]).astype(int)
    _line(
        console,
        f"  median {middle:,}, 95% up to {high:,}, longest {lengths.max():,}, "
        f"mean {lengths.mean():,.0f}; {1 - part.trained.sum() / tokens:.0%} of tokens masked",
    )
    _line(console, f"longer than max_length={part.max_length:,}: {part.truncated_share:.1%}")
    fitted = part.fitted
    outcomes = [(fitted.truncated, "cut at max_length"), (fitted.split, "go on in further rows")]
    outcomes += [(n, f"dropped: {reason}") for reason, n in fitted.dropped.items()]
    for number, what in outcomes:
        if number:
            _line(console, f"  {number:,} {what}")


def _edges(longest: int) -> list[int]:
    """Bounds that double, up to a bin that holds the longest row."""
    edges, bound = [1], 64
    while edges[-1] <= longest:
        edges.append(bound + 1)
        bound *= 2
    return edges


def _print_row(row: ShownRow, console: Console) -> None:
    _line(console, "")
    _line(console, f"--- {row.where}: {row.tokens:,} tokens, {row.trained:,} trained")
    text = Text()
    before, after = ("⟦", "⟧") if _unicode(console) else ("[[", "]]")
    for run in row.runs:
        said = _short(run.text)
        if run.trained and run.weight != 1:
            said = f"x{run.weight:g} {said}"
        if console.is_terminal:
            text.append(said, style="bold green" if run.trained else "dim")
        else:
            text.append(f"{before}{said}{after}" if run.trained else said)
    console.print(text, soft_wrap=True)
    if row.cut:
        _line(console, f"--- cut: {row.cut:,} tokens over max_length")


def _short(text: str) -> str:
    if len(text) <= _ROW_CHARS:
        return text
    half = _ROW_CHARS // 2
    return f"{text[:half]} ... {len(text) - 2 * half:,} characters ... {text[-half:]}"


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

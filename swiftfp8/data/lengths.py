"""Rows over `max_length`: cut, go on in further rows, or left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

MASKED = -100
Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Rows of at most `max_length` tokens, and what it took: counts, dropped rows by reason."""

    pairs: list[Pair]
    dropped: dict[str, int]
    truncated: int
    split: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes all rows go as one array: thousands of small ones take long."""
        rows = [row for pair in self.pairs for row in pair]
        flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return _fitted, (flat, ends, self.dropped, self.truncated, self.split)


def _fitted(
    flat: np.ndarray, ends: np.ndarray, dropped: dict[str, int], truncated: int, split: int
) -> Fitted:
    rows = np.split(flat, ends[:-1]) if len(ends) else []
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    return Fitted(pairs=pairs, dropped=dropped, truncated=truncated, split=split)


def fit_rows(
    pairs: Iterable[Pair], limit: int, truncation: str, *, bos: int | None = None
) -> Fitted:
    """Bring (ids, labels) rows to `limit` tokens.

    Plain text, which is trained whole, goes on in a new row, so that no token is lost. A
    conversation loses its end (`right`), or its beginning but for the token `bos` (`left`), and is
    dropped where that leaves nothing to train on; or it goes on in new rows, those without a token
    to train on left out (`split`). `delete` drops every row that is too long.
    """
    kept: list[Pair] = []
    dropped: Counter[str] = Counter()
    truncated = split = 0
    for ids, labels in pairs:
        if len(ids) <= limit:
            pieces = [(ids, labels)]
        elif truncation == "delete":
            dropped[f"longer than max_length={limit}"] += 1
            continue
        elif labels[0] != MASKED or truncation == "split":
            starts = range(0, len(ids), limit)
            pieces = [(ids[i : i + limit], labels[i : i + limit]) for i in starts]
            split += 1
        elif truncation == "left":
            pieces = [_end_of(ids, labels, limit, bos)]
            truncated += 1
        else:
            pieces = [(ids[:limit], labels[:limit])]
            truncated += 1
        learned = [piece for piece in pieces if np.any(piece[1][1:] != MASKED)]
        kept += learned  # of the others nothing is learned: nothing predicts the first token
        whole = bool(len(labels)) and labels[0] != MASKED
        lost = len(pieces) - len(learned) if whole or not learned else 0
        if lost:
            dropped[f"no token to learn within max_length={limit}"] += lost if whole else 1
    return Fitted(pairs=kept, dropped=dict(dropped), truncated=truncated, split=split)


def _end_of(ids: np.ndarray, labels: np.ndarray, limit: int, bos: int | None) -> Pair:
    """The last `limit` tokens, or the first and one less where it is `bos`, as models expect it."""
    if bos is None or ids[0] != bos or limit < 2:
        return ids[-limit:], labels[-limit:]
    rest = slice(len(ids) - limit + 1, None)
    return np.concatenate([ids[:1], ids[rest]]), np.concatenate([labels[:1], labels[rest]])

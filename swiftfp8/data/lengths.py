"""Rows over `max_length`: cut, go on in further rows, or left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

MASKED = -100
Pair = tuple[np.ndarray, ...]
"""A row's ids and labels (int32), and where `data.loss_weights` is set its weights (float32)."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Rows of at most `max_length` tokens, and what it took: counts, dropped rows by reason."""

    pairs: list[Pair]
    dropped: dict[str, int]
    truncated: int
    split: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes all rows go as one array: thousands of small ones take long."""
        columns = [np.concatenate(column) for column in zip(*self.pairs, strict=True)]
        lengths = [len(pair[0]) for pair in self.pairs]
        return _fitted, (columns, lengths, self.dropped, self.truncated, self.split)


def _fitted(
    columns: list[np.ndarray],
    lengths: list[int],
    dropped: dict[str, int],
    truncated: int,
    split: int,
) -> Fitted:
    cuts = np.cumsum(lengths)[:-1]
    pairs = list(zip(*(np.split(column, cuts) for column in columns), strict=True))
    return Fitted(pairs=pairs, dropped=dropped, truncated=truncated, split=split)


def fit_rows(
    pairs: Iterable[Pair], limit: int, truncation: str, *, bos: int | None = None
) -> Fitted:
    """Bring rows to `limit` tokens.

    Plain text, which is trained whole, goes on in a new row, so that no token is lost. A
    conversation loses its end (`right`), or its beginning but for the token `bos` (`left`), and is
    dropped where that leaves nothing to train on; or it goes on in new rows, those without a token
    to train on left out (`split`). `delete` drops every row that is too long.
    """
    kept: list[Pair] = []
    dropped: Counter[str] = Counter()
    truncated = split = 0
    for pair in pairs:
        ids, labels = pair[:2]
        if len(ids) <= limit:
            pieces = [pair]
        elif truncation == "delete":
            dropped[f"longer than max_length={limit}"] += 1
            continue
        elif labels[0] != MASKED or truncation == "split":
            starts = range(0, len(ids), limit)
            pieces = [tuple(column[i : i + limit] for column in pair) for i in starts]
            split += 1
        elif truncation == "left":
            pieces = [_end_of(pair, limit, bos)]
            truncated += 1
        else:
            pieces = [tuple(column[:limit] for column in pair)]
            truncated += 1
        learned = [piece for piece in pieces if np.any(piece[1][1:] != MASKED)]
        kept += learned  # of the others nothing is learned: nothing predicts the first token
        whole = bool(len(labels)) and labels[0] != MASKED
        lost = len(pieces) - len(learned) if whole or not learned else 0
        if lost:
            dropped[f"no token to learn within max_length={limit}"] += lost if whole else 1
    return Fitted(pairs=kept, dropped=dict(dropped), truncated=truncated, split=split)


def _end_of(pair: Pair, limit: int, bos: int | None) -> Pair:
    """The last `limit` tokens, or the first and one less where it is `bos`, as models expect it."""
    ids = pair[0]
    if bos is None or ids[0] != bos or limit < 2:
        return tuple(column[-limit:] for column in pair)
    rest = slice(len(ids) - limit + 1, None)
    return tuple(np.concatenate([column[:1], column[rest]]) for column in pair)

"""Rows over `max_length`: cut, go on in further rows, or left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

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


def fit_rows(pairs: Iterable[Pair], limit: int, truncation: str) -> Fitted:
    """Bring (ids, labels) rows to `limit` tokens.

    A conversation loses its end, and is dropped where that leaves nothing to train on; plain text,
    which is trained whole, goes on in a new row, so that no token is lost. `truncation="delete"`
    drops every row that is too long.
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
        elif labels[0] != MASKED:
            starts = range(0, len(ids), limit)
            pieces = [(ids[i : i + limit], labels[i : i + limit]) for i in starts]
            split += 1
        else:
            pieces = [(ids[:limit], labels[:limit])]
            truncated += 1
        for piece in pieces:
            if np.all(piece[1][1:] == MASKED):  # nothing predicts the first token
                dropped[f"no token to learn within max_length={limit}"] += 1
            else:
                kept.append(piece)
    return Fitted(pairs=kept, dropped=dict(dropped), truncated=truncated, split=split)

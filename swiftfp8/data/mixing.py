"""Entries of `dataset` mixed by shares (`data.interleave_prob`) in place of one after the other.

Each step draws an entry by its share and takes that entry's next row. `first_exhausted` stops when
an entry has no further row, so no row is repeated and some are left out; `all_exhausted` begins an
entry anew until each was used up once, so no row is left out and some are repeated. Names and
meaning are those of `datasets.interleave_datasets` and ms-swift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swiftfp8.data.chat import Example
from swiftfp8.errors import SwiftFP8Error

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

_BLOCK = 4096
_MOST = 50_000_000  # rows: beyond this a share is a slip


def check_shares(config: Config) -> None:
    """Raise SwiftFP8Error unless there is one share for each entry, or none at all."""
    shares, entries = config.data.interleave_prob, config.dataset
    if shares and len(shares) != len(entries):
        raise SwiftFP8Error(
            f"{len(shares)} shares for {len(entries)} data sets",
            where="data.interleave_prob",
            fix="give one number for each entry of dataset, in their order",
        )


def mix(
    examples: Sequence[Example], entries: Sequence[str], shares: Sequence[float], stop: str,
    seed: int,
) -> list[Example]:  # fmt: skip
    """The mixed rows, drawn by `seed`; `shares` are taken as parts of their sum.

    Raises:
        SwiftFP8Error: an entry has no rows, or the shares ask for more rows than can be meant.
    """
    rows: list[list[Example]] = [[] for _ in entries]
    for example in examples:
        rows[example.entry].append(example)
    parts = np.array(shares, dtype=np.float64) / sum(shares)
    for entry, own, part in zip(entries, rows, parts, strict=True):
        if not own or (stop == "all_exhausted" and len(own) / part > _MOST):
            raise SwiftFP8Error(
                f"'{entry}' has no row to mix in"
                if not own
                else f"a share of {part:.2g} uses up the {len(own)} rows of '{entry}' after "
                f"{len(own) / part:,.0f} only",
                where="data.interleave_prob",
                fix="change the shares, or leave the entry out",
            )
    rng = np.random.default_rng(seed)
    taken = [0] * len(rows)
    mixed: list[Example] = []
    while True:
        for k in rng.choice(len(rows), size=_BLOCK, p=parts).tolist():
            mixed.append(rows[k][taken[k] % len(rows[k])])
            taken[k] += 1
            if taken[k] == len(rows[k]) and (
                stop == "first_exhausted"
                or all(n >= len(own) for n, own in zip(taken, rows, strict=True))
            ):
                return mixed

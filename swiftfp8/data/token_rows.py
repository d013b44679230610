"""Tokenized rows in flat arrays: a few bytes a token, whatever the rows' number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from swiftfp8.data.cache import KeptPart
from swiftfp8.data.lengths import MASKED, Pair
from swiftfp8.data.report import PartReport


class TokenRows:
    """Map-style rows `{input_ids, labels}`, or `loss_weights` too, in flat arrays: 4 bytes each."""

    def __init__(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
    ) -> None:
        self.lengths = lengths
        self._ends = np.cumsum(lengths)
        self._columns = {"input_ids": ids, "labels": labels}
        if weights is not None:
            self._columns["loss_weights"] = weights

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> TokenRows:
        """From rows one by one."""
        assert pairs
        ids, labels, *weights = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return cls(ids, labels, np.array([len(pair[0]) for pair in pairs], np.int64), *weights)

    def keep(self, report: PartReport) -> KeptPart:
        """What a cache keeps of the rows."""
        return KeptPart(
            ids=self._columns["input_ids"],
            labels=self._columns["labels"],
            weights=self._columns.get("loss_weights"),
            lengths=self.lengths,
            report=report,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[Any]]:
        return {name: column.tolist() for name, column in self._row(index).items()}

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, np.ndarray]]:
        """Rows as arrays, for torch's data loader: lists of numbers take 40 times as long."""
        return [self._row(index) for index in indices]

    def _row(self, index: int) -> dict[str, np.ndarray]:
        end = self._ends[index]
        start = end - self.lengths[index]
        return {name: column[start:end] for name, column in self._columns.items()}

    def gather(self, order: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of the rows in another order, one row after the other."""
        starts = (self._ends - self.lengths)[order]
        sizes = self.lengths[order]
        begins = np.cumsum(sizes) - sizes
        take = np.arange(sizes.sum()) + np.repeat(starts - begins, sizes)
        return {name: column[take] for name, column in self._columns.items()}

    @property
    def trained_tokens(self) -> int:
        """How many tokens have a loss."""
        return int(np.count_nonzero(self._columns["labels"] != MASKED))

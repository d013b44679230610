"""Tokenized rows of the tasks that are no language modelling, and how they become batches.

All sequences of a batch go through the model in one forward pass, one under the other, padded on
the right: chosen answers above rejected ones, anchors above positives above negatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftfp8.data.lengths import MASKED, Pair

if TYPE_CHECKING:
    import torch


class Ragged:
    """Arrays of different lengths, one after the other in one array."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(part) for part in parts], dtype=np.int64)
        self._ends = np.cumsum(self.lengths)
        self._flat = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        end = self._ends[index]
        return self._flat[end - self.lengths[index] : end]


class TaskRows:
    """Map-style rows: `sequences` by name, and `values` that are one number or vector a row."""

    def __init__(self, sequences: Mapping[str, Ragged], values: Mapping[str, np.ndarray]) -> None:
        self._sequences = dict(sequences)
        self._values = dict(values)
        sizes = {len(part) for part in (*self._sequences.values(), *self._values.values())}
        assert len(sizes) == 1, sizes
        (self._size,) = sizes

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(self._size)[index]
        row: dict[str, Any] = {name: part[index] for name, part in self._sequences.items()}
        return row | {name: value[index] for name, value in self._values.items()}

    def with_values(self, **values: np.ndarray) -> TaskRows:
        """The same rows with more values."""
        return type(self)(self._sequences, {**self._values, **values})


class RatedRows(TaskRows):
    """Rows `ids labels good`, each with another row's answer after its own prompt (`kl_*`).

    KTO measures on these how far the model moved from its reference; `partner` says whose answer.
    """

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        other = super().__getitem__(int(row.pop("partner")))
        limit = int(row.pop("limit"))
        start, other_start = _answer_start(row["labels"]), _answer_start(other["labels"])
        answer = other["ids"][other_start:]
        ids = np.concatenate([row["ids"][:start], answer])[:limit]
        labels = np.concatenate([np.full(start, MASKED, dtype=np.int32), answer])[:limit]
        return {**row, "kl_ids": ids, "kl_labels": labels}


class RelatedRows:
    """Rows `anchor positive negatives`; a row may have any number of negatives, none too."""

    def __init__(self, anchors: Ragged, positives: Ragged, negatives: Sequence[Ragged]) -> None:
        assert len(anchors) == len(positives) == len(negatives)
        self._anchors, self._positives, self._negatives = anchors, positives, negatives

    def __len__(self) -> int:
        return len(self._anchors)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = range(len(self))[index]
        negatives = self._negatives[index]
        return {
            "anchor": self._anchors[index],
            "positive": self._positives[index],
            "negatives": [negatives[k] for k in range(len(negatives))],
        }

    @property
    def all_have_negatives(self) -> bool:
        """Whether a row can be learned from by itself."""
        return all(len(part) for part in self._negatives)


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How sequences become one tensor."""

    pad_id: int
    token_multiple: int = 1

    def batch(
        self, ids: Sequence[np.ndarray], labels: Sequence[np.ndarray] | None = None
    ) -> dict[str, torch.Tensor]:
        """`input_ids attention_mask` and, where given, `labels`, [sequences, length] int64."""
        import torch

        longest = max(len(part) for part in ids)
        shape = (len(ids), -(-longest // self.token_multiple) * self.token_multiple)
        made = {
            "input_ids": torch.full(shape, self.pad_id, dtype=torch.long),
            "attention_mask": torch.zeros(shape, dtype=torch.long),
        }
        if labels is not None:
            made["labels"] = torch.full(shape, MASKED, dtype=torch.long)
        for k, part in enumerate(ids):
            made["input_ids"][k, : len(part)] = torch.as_tensor(part.astype(np.int64))
            made["attention_mask"][k, : len(part)] = 1
            if labels is not None:
                made["labels"][k, : len(part)] = torch.as_tensor(labels[k].astype(np.int64))
        return made


@dataclass(frozen=True, kw_only=True)
class LabelCollator:
    """Rows `ids target` to `input_ids attention_mask targets`; targets are [B] or [B, labels]."""

    padding: Padding

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """One batch."""
        import torch

        targets = torch.as_tensor(np.stack([row["target"] for row in rows]))
        return {**self.padding.batch([row["ids"] for row in rows]), "targets": targets}


@dataclass(frozen=True, kw_only=True)
class PairCollator:
    """Preference rows to [2B, T]: chosen answers, then rejected ones. `ref_logps...` are [2B]."""

    padding: Padding

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """One batch."""
        return _above_each_other(rows, ("chosen_", "rejected_"), self.padding)


@dataclass(frozen=True, kw_only=True)
class RatedCollator:
    """KTO's rows to [2B, T]: answers, then other rows' answers (see RatedRows); `good` is [B]."""

    padding: Padding

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """One batch."""
        import torch

        batch = _above_each_other(rows, ("", "kl_"), self.padding)
        batch["good"] = torch.as_tensor(np.array([row["good"] for row in rows], dtype=bool))
        return batch


@dataclass(frozen=True, kw_only=True)
class RelatedCollator:
    """Texts to [2B + negatives, T]: anchors, positives, negatives.

    `same` [B, B + negatives] marks candidates that are an anchor's own positive word for word, and
    so no negatives of it; its diagonal is the positive itself.
    """

    padding: Padding

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """One batch."""
        import torch

        positives = [row["positive"] for row in rows]
        negatives = [negative for row in rows for negative in row["negatives"]]
        candidates = [part.tobytes() for part in (*positives, *negatives)]
        batch = self.padding.batch([row["anchor"] for row in rows] + positives + negatives)
        batch["same"] = torch.tensor(
            [[own == other for other in candidates] for own in candidates[: len(rows)]]
        )
        return batch


def pairs_to_rows(chosen: Sequence[Pair], rejected: Sequence[Pair]) -> TaskRows:
    """Preference rows of (ids, labels) pairs."""
    return TaskRows(
        {
            "chosen_ids": Ragged([ids for ids, _ in chosen]),
            "chosen_labels": Ragged([labels for _, labels in chosen]),
            "rejected_ids": Ragged([ids for ids, _ in rejected]),
            "rejected_labels": Ragged([labels for _, labels in rejected]),
        },
        {},
    )


def rated_to_rows(
    pairs: Sequence[Pair], good: Sequence[bool], *, limit: int, seed: int
) -> RatedRows:
    """KTO's rows; whose answer goes with whose prompt is drawn by `seed`, once for the run."""
    count = len(pairs)
    order = np.random.default_rng(seed).permutation(count)
    partner = np.empty(count, dtype=np.int64)
    partner[order] = np.roll(order, -1)
    return RatedRows(
        {
            "ids": Ragged([ids for ids, _ in pairs]),
            "labels": Ragged([labels for _, labels in pairs]),
        },
        {
            "good": np.array(good, dtype=bool),
            "partner": partner,
            "limit": np.full(count, limit, dtype=np.int64),
        },
    )


def _answer_start(labels: np.ndarray) -> int:
    """Index of the first trained token."""
    return int(np.argmax(labels != MASKED))


def _above_each_other(
    rows: Sequence[Mapping[str, Any]], sides: Sequence[str], padding: Padding
) -> dict[str, torch.Tensor]:
    """All rows' sequences of the first side, then of the second, with their `ref_logps`."""
    import torch

    ids = [row[f"{side}ids"] for side in sides for row in rows]
    labels = [row[f"{side}labels"] for side in sides for row in rows]
    batch = padding.batch(ids, labels)
    for name in (name for name in rows[0] if name.startswith("ref_logps")):
        values = np.stack([row[name] for row in rows]).T.reshape(-1)
        batch[name] = torch.as_tensor(values, dtype=torch.float32)
    return batch

"""Rows of language modelling to a padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftfp8.data.lengths import MASKED


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Pads rows on the right to one length, a multiple of `token_multiple`."""

    pad_id: int
    token_multiple: int = 1

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Any]:
        """`input_ids` and `labels` (-100 = no loss) [rows, length] int64, and `num_tokens`.

        Where rows have `loss_weights`, those too, in float32. There is no attention mask: what is
        to the right is never seen by causal attention, which is faster without one. `num_tokens`
        counts what is not padding, for the trainer.
        """
        import torch

        longest = max(len(row["input_ids"]) for row in rows)
        length = -(-longest // self.token_multiple) * self.token_multiple
        fills: dict[str, Any] = {"input_ids": self.pad_id, "labels": MASKED, "loss_weights": 0.0}
        batch: dict[str, Any] = {"num_tokens": sum(len(row["input_ids"]) for row in rows)}
        for name in rows[0]:
            kind = torch.float32 if name == "loss_weights" else torch.long
            batch[name] = torch.full((len(rows), length), fills[name], dtype=kind)
            for k, row in enumerate(rows):
                batch[name][k, : len(row[name])] = torch.as_tensor(row[name])
        return batch

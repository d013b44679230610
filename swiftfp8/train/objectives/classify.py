"""`task=seq_cls`: cross entropy, binary cross entropy for each label, or squared error.

Accuracy and F1 (the mean over labels that occur, "macro") come from counts; of several labels a row
is right where all of them are. A number is judged by its mean squared error and Pearson's r.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from swiftfp8.train.objectives._objective import Batch, Outcome, Sums, run_model


class Classification:
    """Objective of a classifier or a regressor."""

    def __init__(self, problem_type: str, num_labels: int, *, masks: bool = True) -> None:
        self._problem = problem_type
        self._labels = num_labels
        self._masks = masks

    def rows(self, batch: Batch) -> int:
        """Rows."""
        return len(batch["targets"])

    def run(self, model: Any, batch: Batch) -> Outcome:
        """One forward pass."""
        logits, targets = (
            run_model(model, batch, masks=self._masks).logits.float(),
            batch["targets"],
        )
        if self._problem == "regression":
            values = logits[:, 0]
            loss = functional.mse_loss(values, targets, reduction="sum")
            return Outcome(loss=loss, sums=_moments(values.detach(), targets))
        if self._problem == "multi_label_classification":
            each = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            return Outcome(
                loss=each.mean(dim=1).sum(), sums=_hits(logits.detach() > 0, targets > 0)
            )
        loss = functional.cross_entropy(logits, targets, reduction="sum")
        guessed = functional.one_hot(logits.argmax(dim=-1), self._labels).bool()
        return Outcome(
            loss=loss, sums=_hits(guessed, functional.one_hot(targets, self._labels).bool())
        )

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`accuracy` and `f1`, or `mse` and `pearson`."""
        if self._problem == "regression":
            return _regression(sums["moments"])
        rows = float(sums["rows"])
        hit, extra, missed = sums["hit"], sums["extra"], sums["missed"]
        occurs = (hit + extra + missed) > 0
        f1 = 2 * hit / (2 * hit + extra + missed).clamp(min=1)
        return {
            "accuracy": float(sums["right"]) / rows,
            "f1": float(f1[occurs].mean()) if bool(occurs.any()) else 0.0,
        }


def _hits(guessed_BL: torch.Tensor, true_BL: torch.Tensor) -> Sums:
    """Counts by label: guessed rightly, guessed wrongly, missed; and rows that are all right."""
    return {
        "rows": torch.as_tensor(float(len(true_BL)), device=true_BL.device),
        "right": (guessed_BL == true_BL).all(dim=1).sum(),
        "hit": (guessed_BL & true_BL).sum(dim=0),
        "extra": (guessed_BL & ~true_BL).sum(dim=0),
        "missed": (~guessed_BL & true_BL).sum(dim=0),
    }


def _moments(values_B: torch.Tensor, targets_B: torch.Tensor) -> Sums:
    x, y = values_B.double(), targets_B.double()
    sums = [torch.ones_like(x), x, y, x * x, y * y, x * y]
    return {"moments": torch.stack([part.sum() for part in sums])}


def _regression(moments: torch.Tensor) -> dict[str, float]:
    n, x, y, xx, yy, xy = moments.tolist()
    covariance = xy - x * y / n
    spread = max(xx - x * x / n, 0.0) * max(yy - y * y / n, 0.0)
    return {
        "mse": max(xx - 2 * xy + yy, 0.0) / n,
        "pearson": covariance / spread**0.5 if spread > 0 else 0.0,
    }

"""`task=reward`: Bradley-Terry. -log sigmoid(r(chosen) - r(rejected)), r a conversation's score.

`center` adds center (r(chosen) + r(rejected))², which keeps scores near zero (Eisenstein et al.
2023, arXiv 2312.09244). Bradley-Terry as in Ouyang et al. 2022, arXiv 2203.02155, eq. 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import logsigmoid

from swiftfp8.train.objectives._objective import Batch, Outcome, Sums, run_model


class Reward:
    """Objective of a reward model: chosen answers above rejected ones in a batch of 2B rows."""

    def __init__(self, center: float = 0.0, *, masks: bool = True) -> None:
        self._center = center
        self._masks = masks

    def rows(self, batch: Batch) -> int:
        """Pairs."""
        return len(batch["input_ids"]) // 2

    def run(self, model: Any, batch: Batch) -> Outcome:
        """Both answers in one forward pass."""
        scores = run_model(model, batch, masks=self._masks).logits.float()[:, 0]
        chosen, rejected = scores.chunk(2)
        losses = -logsigmoid(chosen - rejected)
        if self._center:
            losses = losses + self._center * (chosen + rejected) ** 2
        return Outcome(loss=losses.sum(), sums=preference_sums(chosen, rejected))

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`rewards/chosen`, `rewards/rejected`, `rewards/accuracies`, `rewards/margins`."""
        return means(sums)


def preference_sums(chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> Sums:
    """What is logged of rewards, by TRL's names."""
    chosen, rejected = chosen_B.detach(), rejected_B.detach()
    return {
        "rows": torch.as_tensor(float(len(chosen)), device=chosen.device),
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/accuracies": (chosen > rejected).sum(),
        "rewards/margins": (chosen - rejected).sum(),
    }


def means(sums: Sums) -> dict[str, float]:
    """Every sum but `rows`, divided by it."""
    rows = float(sums["rows"])
    return {name: float(value) / rows for name, value in sums.items() if name != "rows"}

"""What the training loop asks of a task.

Metrics are made of sums over rows, so that batches, micro-batches and processes simply add up:
an accuracy is right answers over answers, an F1 comes from a matrix of counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Batch = Mapping[str, torch.Tensor]
Sums = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one batch: the rows' losses summed, [], and sums that metrics are made of (no gradient).

    A sum's name is `metric` for a mean over rows, and anything that `Objective.metrics` knows.
    """

    loss: torch.Tensor
    sums: Sums = field(default_factory=dict)


class Objective(Protocol):
    """A task's loss and metrics. A loss is the mean over rows, whatever they hold."""

    def rows(self, batch: Batch) -> int:
        """Rows of a batch, over which the loss is a mean."""

    def run(self, model: Any, batch: Batch) -> Outcome:
        """A forward pass, in the caller's precision context."""

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Metrics by name, of added-up sums in float64 on the CPU."""


def merge(total: Sums, more: Mapping[str, torch.Tensor]) -> Sums:
    """Both sums added, name by name, in float64."""
    added = dict(total)
    for name, value in more.items():
        value = value.detach().double()
        added[name] = added[name] + value if name in added else value
    return added


def finish(objective: Objective, sums: Sums) -> dict[str, float]:
    """Metrics of sums that may lie on a device; {} where there is nothing to measure."""
    return objective.metrics({name: value.cpu() for name, value in sums.items()}) if sums else {}


def run_model(model: Any, batch: Batch, *, masks: bool) -> Any:
    """The model's own outputs for a batch of sequences, padded on the right.

    An encoder must be told what is padding; causal attention never sees it, and is faster without
    a mask.
    """
    if masks:
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return model(input_ids=batch["input_ids"])

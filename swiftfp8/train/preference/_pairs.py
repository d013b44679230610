"""What a loss on preferences is computed from, and how it is found by name.

A loss is a module of this folder with
    NAME: str
    losses(pairs, options) -> [B]             one loss for each pair
    rewards(pairs, options) -> ([B], [B])     optional: what the log calls a reward; DPO's otherwise
    NLL: "prompt and answer" | "answer"       optional: of which tokens it wants `pairs.nll`
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from swiftfp8.registry import discover, unknown

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

Rewards = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Log-probabilities of B pairs of answers, each [B], summed over the answer's tokens.

    `*_tokens` are the answers' lengths. `ref_*` are the reference's, None where the loss has none.
    `nll` [] is the chosen answers' mean loss per token, None where the loss doesn't want it.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor
    ref_chosen: torch.Tensor | None = None
    ref_rejected: torch.Tensor | None = None
    nll: torch.Tensor | None = None

    @property
    def chosen_ratio(self) -> torch.Tensor:
        """log π(y_w) - log π_ref(y_w)."""
        assert self.ref_chosen is not None
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> torch.Tensor:
        """log π(y_l) - log π_ref(y_l)."""
        assert self.ref_rejected is not None
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> torch.Tensor:
        """By how much more than its reference the model prefers the chosen answer."""
        return self.chosen_ratio - self.rejected_ratio


def find_loss(name: str) -> ModuleType:
    """The loss called `name`."""
    losses = {
        key: module
        for key, module in discover("swiftfp8.train.preference").items()
        if hasattr(module, "losses")
    }
    if name not in losses:
        raise unknown("loss", name, losses, where="rlhf.loss_type")
    return losses[name]


def reward_pair(loss: ModuleType, pairs: Pairs, options: RlhfConfig) -> Rewards:
    """Rewards of both answers, for the log; no gradient."""
    with torch.no_grad():
        if hasattr(loss, "rewards"):
            rewards: Rewards = loss.rewards(pairs, options)
            return rewards
        return options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio

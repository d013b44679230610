"""KTO: good answers up and bad ones down, each against how far the model has moved in general.

    good: w_d (1 - sigmoid(β (r - z)))        bad: w_u (1 - sigmoid(β (z - r)))

r is an answer's log-ratio; z = max(0, mean log-ratio of other rows' answers after these prompts), a
constant, estimates the divergence from the reference. Ethayarajh et al. 2024, arXiv 2402.01306.
(It takes single answers, so it is not one of the losses on pairs that are found by name.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig


def kto_losses(
    ratio_B: torch.Tensor, kl_ratio_B: torch.Tensor, good_B: torch.Tensor, options: RlhfConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [B], and z []."""
    z = kl_ratio_B.detach().mean().clamp(min=0)
    side = torch.where(good_B, 1.0, -1.0)
    weight = torch.where(good_B, options.desirable_weight, options.undesirable_weight)
    return weight * (1 - torch.sigmoid(options.beta * side * (ratio_B - z))), z

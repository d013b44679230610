"""APO-zero, for answers better than the model's own: chosen up, rejected down.

(1 - sigmoid(β r_w)) + sigmoid(β r_l), r the log-ratios. D'Oosterlinck et al. 2024, arXiv
2408.06266, eq. 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftfp8.train.preference._pairs import Pairs

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

NAME = "apo_zero"


def losses(pairs: Pairs, options: RlhfConfig) -> torch.Tensor:
    """[B]."""
    up = 1 - torch.sigmoid(options.beta * pairs.chosen_ratio)
    return up + torch.sigmoid(options.beta * pairs.rejected_ratio)

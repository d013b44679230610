"""APO-down, for answers worse than the model's own: both down, the rejected one more.

sigmoid(β r_w) + (1 - sigmoid(β (r_w - r_l))). D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftfp8.train.preference._pairs import Pairs

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

NAME = "apo_down"


def losses(pairs: Pairs, options: RlhfConfig) -> torch.Tensor:
    """[B]."""
    down = torch.sigmoid(options.beta * pairs.chosen_ratio)
    return down + 1 - torch.sigmoid(options.beta * pairs.margin)

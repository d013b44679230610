"""SLiC's hinge on DPO's margin: max(0, 1 - β margin). Zhao et al. 2023, arXiv 2305.10425."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftfp8.train.preference._pairs import Pairs

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

NAME = "hinge"


def losses(pairs: Pairs, options: RlhfConfig) -> torch.Tensor:
    """[B]."""
    return torch.relu(1 - options.beta * pairs.margin)

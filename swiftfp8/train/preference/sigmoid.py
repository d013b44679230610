"""DPO as published: -log sigmoid(β margin), the margin is of log-ratios.

Rafailov et al. 2023, arXiv 2305.18290, eq. 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from swiftfp8.train.preference._pairs import Pairs

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

NAME = "sigmoid"


def losses(pairs: Pairs, options: RlhfConfig) -> torch.Tensor:
    """[B]."""
    return -logsigmoid(options.beta * pairs.margin)

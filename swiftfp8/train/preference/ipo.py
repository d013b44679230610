"""IPO: (margin per token - 1 / 2β)², each log-ratio divided by its answer's length.

Azar et al. 2023, arXiv 2310.12036, eq. 17, with the mean per token that TRL settled on with its
authors, so that β means the same for long and short answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swiftfp8.train.preference._pairs import Pairs

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

NAME = "ipo"


def losses(pairs: Pairs, options: RlhfConfig) -> torch.Tensor:
    """[B]."""
    chosen = pairs.chosen_ratio / pairs.chosen_tokens.clamp(min=1)
    rejected = pairs.rejected_ratio / pairs.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * options.beta)) ** 2

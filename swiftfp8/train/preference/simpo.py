"""SimPO: -log sigmoid(β (log p per token, chosen - rejected) - gamma); no reference.

`cpo_alpha` adds the chosen answer's own loss (CPO-SimPO), `label_smoothing` takes some preferences
for the wrong way round. Meng et al. 2024, arXiv 2405.14734, eq. 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from swiftfp8.train.preference._pairs import Pairs, Rewards

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

NAME = "simpo"
NLL = "answer"


def losses(pairs: Pairs, options: RlhfConfig) -> torch.Tensor:
    """[B]."""
    chosen, rejected = rewards(pairs, options)
    logits = chosen - rejected - options.simpo_gamma
    smoothing = options.label_smoothing
    ranked = -logsigmoid(logits) * (1 - smoothing) - logsigmoid(-logits) * smoothing
    if not options.cpo_alpha:
        return ranked
    assert pairs.nll is not None
    return ranked + options.cpo_alpha * pairs.nll


def rewards(pairs: Pairs, options: RlhfConfig) -> Rewards:
    """β times the mean log-probability per token."""
    return (
        options.beta * pairs.chosen / pairs.chosen_tokens,
        options.beta * pairs.rejected / pairs.rejected_tokens,
    )

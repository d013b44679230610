"""ORPO: the chosen answer's loss, and the odds of the chosen over the rejected; no reference.

NLL - β log sigmoid(log odds(y_w) - log odds(y_l)), odds = p / (1 - p), log p the mean per token. As
in the authors' code and TRL's, NLL is over the prompt's tokens too. Hong et al. 2024, arXiv
2403.07691.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from swiftfp8.train.preference._pairs import Pairs, Rewards

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig

NAME = "orpo"
NLL = "prompt and answer"


def losses(pairs: Pairs, options: RlhfConfig) -> torch.Tensor:
    """[B]."""
    assert pairs.nll is not None
    chosen, rejected = _per_token(pairs)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return pairs.nll - options.beta * logsigmoid(log_odds)


def rewards(pairs: Pairs, options: RlhfConfig) -> Rewards:
    """β times the mean log-probability per token."""
    chosen, rejected = _per_token(pairs)
    return options.beta * chosen, options.beta * rejected


def _per_token(pairs: Pairs) -> Rewards:
    return pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) for x < 0, exact on both sides of -log 2."""
    x = x.clamp(max=-1e-7)  # an answer of probability 1 has infinite odds
    near = torch.log(-torch.expm1(x.clamp(min=-math.log(2))))
    return torch.where(x > -math.log(2), near, torch.log1p(-torch.exp(x)))

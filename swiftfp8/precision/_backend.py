"""What a precision backend offers, and the module that every backend's linear derives from.

A backend is a module in this folder with
    NAME: str
    available() -> str | None            reason why it can't be used here, None where it can
    RECIPES: frozenset[str]              the FP8 recipes that it runs
    token_multiple(recipe) -> int        tokens per matmul must be a multiple of this
    convert(linear, layer, recipe) -> PrecisionLinear
    context(recipe) -> context manager   around the model's forward pass
    checkpoint(recipe) -> callable       (function, *args) -> outputs, for gradient checkpointing
It sees `nn.Linear` and a `LayerPlan`, never a model's name.
"""

from __future__ import annotations

import torch
from torch import nn


class PrecisionLinear(nn.Module):
    """y = x Wᵀ + b at a planned precision. x is [..., in_features], y [..., out_features].

    `enabled` switches FP8 on and off between steps (`precision.start_step`). `ran_fp8` and
    `ran_high` count forward passes by what really executed, for the measured coverage.
    """

    in_features: int
    out_features: int

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.enabled = True
        self.ran_fp8 = 0
        self.ran_high = 0

    def dequantize(self) -> torch.Tensor:
        """The weight that the matmul sees, [out_features, in_features], float32."""
        raise NotImplementedError

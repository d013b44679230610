"""No FP8: the linear stays the `nn.Linear` that it is, in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from swiftfp8.plan import LayerPlan, RecipeOptions

NAME = "high"


class Float32Linear(nn.Linear):
    """A linear that computes in FP32 under autocast too, whatever dtype its weight is held in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Y = x Wᵀ + b in FP32."""
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(x.float(), self.weight.float(), bias)


def compute_in_float32(module: nn.Module) -> None:
    """Make every plain linear of `module`, itself included, compute in FP32."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Float32Linear


RECIPES: frozenset[str] = frozenset()


def available() -> str | None:
    """Always: there is nothing to install."""
    return None


def token_multiple(recipe: RecipeOptions | None) -> int:
    """Any number of tokens will do."""
    return 1


def convert(linear: nn.Linear, layer: LayerPlan, recipe: RecipeOptions | None) -> nn.Linear:
    """The linear itself."""
    return linear


def context(recipe: RecipeOptions | None) -> AbstractContextManager[Any]:
    """Nothing to switch on."""
    return nullcontext()


def checkpoint(recipe: RecipeOptions | None) -> Callable[..., Any]:
    """PyTorch's non-reentrant activation checkpoint."""
    return partial(torch_checkpoint, use_reentrant=False)

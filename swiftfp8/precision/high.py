"""No FP8: the linear stays the `nn.Linear` that it is, in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from swiftfp8.plan import LayerPlan, RecipeOptions

NAME = "high"
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

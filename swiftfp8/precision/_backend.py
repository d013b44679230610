"""What a precision backend offers, and the module that every backend's linear derives from.

A backend is a module in this folder with
    NAME: str
    available() -> str | None            reason why it can't be used here, None where it can
    RECIPES: frozenset[str]              the FP8 recipes that it runs
    token_multiple(recipe) -> int        tokens per matmul are padded to a multiple of this
    convert(linear, layer, recipe) -> nn.Module
    context(recipe) -> context manager   around the model's forward pass
    finish(model, recompute=) -> {layer: None | str}
                                         optional, last: fuse what fits, with a reason for the rest
    checkpoint(recipe) -> callable       (function, *args) -> outputs, for gradient checkpointing
It sees `nn.Linear` and a `LayerPlan`, never a model's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional

from swiftfp8.registry import discover, unknown


class PrecisionLinear(nn.Module, ABC):
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

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """The weight that the matmul sees, [out_features, in_features], float32."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes that the weight holds now: values, scales and any cached transpose."""

    def forward_lora(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        dropout: nn.Module,
    ) -> torch.Tensor:
        """y + scaling · dropout(x) Aᵀ Bᵀ; a is [rank, in], b [out, rank].

        A backend that fuses LoRA with the base matmul overrides this.
        """
        return add_lora(self(x), x, a, b, scaling, dropout)

    def scaling_state(self) -> dict[str, torch.Tensor]:
        """What a recipe remembers between steps, as plain tensors; empty where it has no memory."""
        return {}

    def load_scaling_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `scaling_state` returned."""
        assert not state, f"{type(self).__name__} keeps no scaling state"

    def extra_repr(self) -> str:
        """Shapes, as nn.Linear prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def load_backends() -> dict[str, ModuleType]:
    """Every backend by name: the public modules of this folder that offer `convert`."""
    found = discover("swiftfp8.precision")
    return {name: module for name, module in found.items() if hasattr(module, "convert")}


def find_backend(name: str | None) -> ModuleType:
    """The backend of that name; None is `high`, a plan in which nothing runs in FP8."""
    backends = load_backends()
    name = "high" if name is None else name
    if name not in backends:
        raise unknown("precision backend", name, backends)
    return backends[name]


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What a matmul on x runs in: torch.autocast's dtype where it is on, else x's own."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
    dropout: nn.Module,
) -> torch.Tensor:
    """y + scaling · dropout(x) Aᵀ Bᵀ in y's dtype; float32 A and B are cast down, not y up."""
    hidden = functional.linear(dropout(x).to(y.dtype), a.to(y.dtype))
    return y + functional.linear(hidden, b.to(y.dtype)) * scaling


def pad_tokens(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x [tokens, features] with zero rows added up to a multiple of `multiple`."""
    missing = -x.shape[0] % multiple
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


class _DequantizedMatmul(torch.autograd.Function):
    """y = x Wᵀ with a frozen FP8 W that is dequantized when it is needed, twice, and not kept."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        x: torch.Tensor,
        weight: Callable[[torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        ctx.weight = weight  # type: ignore[attr-defined]
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, weight(x.dtype))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        with torch.autocast(dy.device.type, enabled=False):
            return dy @ ctx.weight(dy.dtype), None  # type: ignore[attr-defined]


def dequantized_matmul(
    x: torch.Tensor, weight: Callable[[torch.dtype], torch.Tensor]
) -> torch.Tensor:
    """x Wᵀ in the compute dtype; `weight(dtype)` dequantizes a frozen W [out, in]."""
    return _DequantizedMatmul.apply(x.to(compute_dtype(x)), weight)

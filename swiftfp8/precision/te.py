"""FP8 through Transformer Engine: `te.Linear` inside, Hugging Face's names outside.

A frozen weight is quantized once and held in FP8 alone, one byte a parameter. Ada and Hopper
multiply FP8 only as TN, so `te.Linear` makes a transposed copy for dx = dy W; it is dropped as
soon as that layer's backward is done, and memory stays at one copy. A trained weight stays a
plain parameter under its own name and is quantized in every forward pass. The bias is added
outside: inside, it would make Transformer Engine quantize dy a second time for nothing.

The `te.Linear` is no submodule. Its `_extra_state`, and a weight that is a tensor subclass, are
thus seen by no state dict, `.to()` or broadcast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.plan import FP8_RECIPES, LayerPlan, RecipeOptions
from swiftfp8.precision._backend import (
    PrecisionLinear,
    compute_dtype,
    dequantized_matmul,
    pad_tokens,
)
from swiftfp8.precision._delayed import DelayedScales, starting_scale
from swiftfp8.precision.recipes import E4M3, amax_of

NAME = "te"
RECIPES = frozenset(FP8_RECIPES)
_TOKEN_MULTIPLE = {"mxfp8": 32, "fp8_block": 16, "fp8_current": 16, "fp8_delayed": 16}
_STORAGE = (
    "_data",
    "_transpose",
    "_scale_inv",
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
)


@lru_cache
def available() -> str | None:
    """Why Transformer Engine can't run FP8 here, or None where it can."""
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        return f"Transformer Engine can't be imported: {first_line}"
    works, reason = te.is_fp8_available(return_reason=True)
    return None if works else reason


def token_multiple(recipe: RecipeOptions | None) -> int:
    """Tokens per matmul are padded to a multiple of this, with rows of zeros."""
    return 1 if recipe is None else _TOKEN_MULTIPLE[recipe.recipe]


def convert(linear: nn.Linear, layer: LayerPlan, recipe: RecipeOptions) -> PrecisionLinear:
    """A Transformer Engine linear on the linear's own device, which must be a GPU."""
    assert linear.weight.is_cuda, f"{layer.name} must be on the GPU before it is converted"
    kind = TETrainedLinear if layer.trainable else TEFrozenLinear
    return kind(linear, recipe)


def context(recipe: RecipeOptions | None) -> AbstractContextManager[Any]:
    """`te.autocast` under the recipe, around a model's forward pass."""
    if recipe is None:
        return nullcontext()
    import transformer_engine.pytorch as te

    return te.autocast(enabled=True, recipe=build_recipe(recipe))


def checkpoint(recipe: RecipeOptions | None) -> Callable[..., Any]:
    """`te.checkpoint`: recomputes under the recipe and scales of the forward pass."""
    import transformer_engine.pytorch as te

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return te.checkpoint(function, *args, use_reentrant=False, **kwargs)

    return run


@lru_cache
def build_recipe(options: RecipeOptions) -> Any:
    """Transformer Engine's recipe object for our options."""
    from transformer_engine.common import recipe as te

    kwargs: dict[str, Any] = {
        "fp8_format": te.Format.HYBRID if options.fp8_format == "hybrid" else te.Format.E4M3,
        "backward_override": options.backward_override,
    }
    forward_sum = te.MMParams(use_split_accumulator=options.split_accumulator)
    if options.recipe == "fp8_current":
        return te.Float8CurrentScaling(fp8_gemm_fprop=forward_sum, **kwargs)
    if options.recipe == "fp8_block":
        return te.Float8BlockScaling(**kwargs)  # always accumulates split
    if options.recipe == "mxfp8":
        return te.MXFP8BlockScaling(**kwargs)
    if options.backward_override is not None:
        raise SwiftFP8Error(
            "fp8_delayed has no backward_override",
            where="precision.backward_override",
            fix="leave it out, or use precision.recipe=fp8_current",
        )
    recipe = te.DelayedScaling(
        margin=options.margin,
        amax_history_len=options.amax_history_len,
        amax_compute_algo=options.amax_compute_algo,
        **kwargs,
    )
    recipe.fp8_gemm_fprop = forward_sum  # not a field of DelayedScaling, but te.Linear reads it
    return recipe


class TELinear(PrecisionLinear):
    """What a frozen and a trained layer share: padding, counting, seeding, bias."""

    def __init__(self, linear: nn.Linear, recipe: RecipeOptions) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.recipe = recipe
        self.token_multiple = token_multiple(recipe)
        self._delayed = DelayedScales(recipe) if recipe.recipe == "fp8_delayed" else None
        self._te: Any = None

    def _hide(self, te_linear: nn.Module) -> None:
        """Keep te.Linear out of the module tree."""
        object.__setattr__(self, "_te", te_linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Y = x Wᵀ + b, [..., out_features], in the compute dtype."""
        dtype = compute_dtype(x)
        rows = x.to(dtype).reshape(-1, self.in_features)
        if self.enabled and _fp8_is_on():
            y = self._fp8_matmul(rows)
        else:
            y = self._high_matmul(rows)
            self.ran_high += 1
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)

    def _fp8_matmul(self, rows: torch.Tensor) -> torch.Tensor:
        tokens = rows.shape[0]
        rows = pad_tokens(rows, self.token_multiple)
        if self._delayed is not None:
            self._delayed.before_forward(self._te, rows)
        y = self._te(rows)
        if self._te.fp8:
            self.ran_fp8 += 1
        else:
            self.ran_high += 1
        if self._delayed is not None:
            y = self._delayed.before_backward(self._te, y)
        return y[:tokens]

    @abstractmethod
    def _high_matmul(self, rows: torch.Tensor) -> torch.Tensor:
        """x Wᵀ in high precision, [tokens, out_features]."""

    def scaling_state(self) -> dict[str, torch.Tensor]:
        """Delayed scaling's scales and amax histories."""
        return {} if self._delayed is None else self._delayed.state(self._te)

    def load_scaling_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore them, before the next forward pass."""
        if self._delayed is not None:
            self._delayed.pending = dict(state)


class TEFrozenLinear(TELinear):
    """A weight held in FP8 alone, for LoRA's base and for inference."""

    def __init__(self, linear: nn.Linear, recipe: RecipeOptions) -> None:
        super().__init__(linear, recipe)
        self.register_parameter("bias", linear.bias)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self._hide(_quantized_te_linear(linear, recipe))
        # MXFP8 can't derive its column-wise blocks from the row-wise ones: it keeps both.
        self._drops_transpose = recipe.recipe != "mxfp8"

    @property
    def weight(self) -> torch.Tensor:
        """Transformer Engine's quantized tensor."""
        return self._te.weight

    def dequantize(self) -> torch.Tensor:
        """The weight that the matmul sees, [out_features, in_features], float32."""
        return self.weight.dequantize(dtype=torch.float32)

    def weight_bytes(self) -> int:
        """Bytes of values, scales and a cached transpose."""
        parts = (getattr(self.weight, name, None) for name in _STORAGE)
        return sum(part.nbytes for part in parts if part is not None)

    def _fp8_matmul(self, rows: torch.Tensor) -> torch.Tensor:
        if self._drops_transpose and rows.requires_grad:
            rows = _DropTranspose.apply(rows, self.weight)
        return super()._fp8_matmul(rows)

    def _high_matmul(self, rows: torch.Tensor) -> torch.Tensor:
        return dequantized_matmul(rows, lambda dtype: self.weight.dequantize(dtype=dtype))


class TETrainedLinear(TELinear):
    """A trained weight in high precision under FP8 matmuls, forward, dgrad and wgrad."""

    def __init__(self, linear: nn.Linear, recipe: RecipeOptions) -> None:
        super().__init__(linear, recipe)
        import transformer_engine.pytorch as te

        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)  # after the weight, as nn.Linear has it
        te_linear = te.Linear(
            linear.in_features,
            linear.out_features,
            bias=False,
            params_dtype=linear.weight.dtype,
            device="meta",
        )
        self._hide(te_linear)

    def dequantize(self) -> torch.Tensor:
        """The weight that the matmul sees, [out_features, in_features], float32."""
        twin = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        twin.weight = nn.Parameter(self.weight.detach(), requires_grad=False)
        quantized = _quantized_te_linear(twin, self.recipe).weight
        return quantized.dequantize(dtype=torch.float32)

    def weight_bytes(self) -> int:
        """Bytes of the trained weight."""
        return self.weight.nbytes

    def _fp8_matmul(self, rows: torch.Tensor) -> torch.Tensor:
        self._te._parameters["weight"] = self.weight
        return super()._fp8_matmul(rows)

    def _high_matmul(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight.to(rows.dtype))


class _DropTranspose(torch.autograd.Function):
    """Identity whose backward, which follows te.Linear's, frees the weight's transposed copy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.weight.update_usage(rowwise_usage=True, columnwise_usage=False)
        return dx, None


def _fp8_is_on() -> bool:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    return bool(FP8GlobalStateManager.is_fp8_enabled())


def _quantized_te_linear(linear: nn.Linear, recipe: RecipeOptions) -> Any:
    """A te.Linear without bias that holds the weight of `linear` in FP8 alone."""
    import transformer_engine.pytorch as te

    weight = linear.weight.detach()
    both_directions = recipe.recipe == "mxfp8"
    with (
        torch.set_grad_enabled(both_directions),
        te.quantized_model_init(enabled=True, recipe=build_recipe(recipe)),
    ):
        te_linear = te.Linear(
            linear.in_features,
            linear.out_features,
            bias=False,
            params_dtype=weight.dtype,
            device=weight.device,
            init_method=nn.init.zeros_,
        )
    te_linear.weight.requires_grad_(False)
    with torch.no_grad():
        if recipe.recipe == "fp8_delayed":
            scale = te_linear.weight._quantizer.scale
            scale.copy_(starting_scale(amax_of(weight), E4M3))
        te_linear.weight.quantize_(weight)
    return te_linear

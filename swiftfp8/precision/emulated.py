"""FP8 numerics on any device, in plain PyTorch: quantize, clamp, cast, dequantize, matmul.

With Q quantizing to FP8 and back, and every sum in float32,

    y  = Q(x) Q(W)ᵀ        x [tokens, in], W [out, in]
    dx = Q(dy) Q(W)        dy in e5m2 under fp8_format "hybrid"
    dW = Q(dy)ᵀ Q(x)       quantized along the tokens, where W is trained

so that the loss of an FP8 run can be studied, and this program tested, without FP8 hardware.
It is slower than high precision, never faster.

Delayed scaling takes its scale from the amax of earlier steps. A step is one `context`; within it
a layer's scales are fixed and its amax only collected, so that recomputing a layer under gradient
checkpointing repeats the very same numbers. The first step has no history and uses the tensor's
own amax, where Transformer Engine alone would use a scale of 1 and flush small gradients to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from swiftfp8.plan import FP8_RECIPES, LayerPlan, RecipeOptions
from swiftfp8.precision._backend import PrecisionLinear, compute_dtype, dequantized_matmul
from swiftfp8.precision.recipes import (
    E4M3,
    WEIGHT_BLOCK,
    Quantized,
    amax_of,
    quantize_rows,
    quantize_weight,
)

NAME = "emulated"
RECIPES = frozenset(FP8_RECIPES)
_TOKEN_MULTIPLE = {"mxfp8": 32, "fp8_block": 16, "fp8_current": 16, "fp8_delayed": 16}
_step = 0


def available() -> str | None:
    """Always: it needs PyTorch alone."""
    return None


def token_multiple(recipe: RecipeOptions | None) -> int:
    """What FP8 hardware would ask for, so that a run's batches are the same there."""
    return 1 if recipe is None else _TOKEN_MULTIPLE[recipe.recipe]


def convert(linear: nn.Linear, layer: LayerPlan, recipe: RecipeOptions) -> PrecisionLinear:
    """An emulated FP8 linear: a trained weight is kept, a frozen one held in FP8 alone."""
    return EmulatedLinear(linear, recipe, trainable=layer.trainable)


@contextmanager
def context(recipe: RecipeOptions | None) -> Iterator[None]:
    """One step of delayed scaling; the other recipes have no memory and ignore it."""
    global _step
    _step += 1
    yield


def checkpoint(recipe: RecipeOptions | None) -> Callable[..., Any]:
    """PyTorch's non-reentrant activation checkpoint."""
    return partial(torch_checkpoint, use_reentrant=False)


class EmulatedLinear(PrecisionLinear):
    """A linear whose matmuls see FP8 numbers.

    A frozen weight is held as the bits of float8_e4m3fn (in a uint8 buffer, which a cast of the
    module's dtype leaves alone) and float32 scales; a trained weight is the parameter `weight`.
    """

    def __init__(self, linear: nn.Linear, recipe: RecipeOptions, *, trainable: bool) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.recipe = recipe
        self.trainable = trainable
        if trainable:
            self.weight = linear.weight
        else:
            held = quantize_weight(linear.weight.detach(), recipe)
            self.register_buffer("weight_bits", held.data.view(torch.uint8), persistent=False)
            self.register_buffer("weight_scale", held.scale, persistent=False)
        # After the weight, as nn.Linear has it: an optimizer's state goes by parameters' order.
        self.register_parameter("bias", linear.bias)
        if self.bias is not None and not trainable:
            self.bias.requires_grad_(False)
        self.x_history = _AmaxHistory(recipe)
        self.dy_history = _AmaxHistory(recipe)

    def __getattr__(self, name: str) -> Any:
        """A frozen layer's `weight` is its float8_e4m3fn values, for whoever asks where it lies."""
        if name == "weight" and "weight_bits" in self.__dict__.get("_buffers", {}):
            return self.weight_bits.view(E4M3)
        return super().__getattr__(name)

    def quantized_weight(self) -> Quantized:
        """The weight as the forward matmul sees it."""
        if self.trainable:
            return quantize_weight(self.weight.detach(), self.recipe)
        block = WEIGHT_BLOCK.get(self.recipe.recipe)
        return Quantized(data=self.weight_bits.view(E4M3), scale=self.weight_scale, block=block)

    def dequantize(self) -> torch.Tensor:
        """The weight that the matmul sees, [out_features, in_features], float32."""
        return self.quantized_weight().dequantize()

    def weight_bytes(self) -> int:
        """Bytes of the values and scales held."""
        if self.trainable:
            return self.weight.nbytes
        return self.weight_bits.nbytes + self.weight_scale.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Y = x Wᵀ + b, [..., out_features], in the compute dtype."""
        dtype = compute_dtype(x)
        rows = x.to(dtype).reshape(-1, self.in_features)
        if self.enabled:
            self.ran_fp8 += 1
            weight = self.weight if self.trainable else None
            amax = self.x_history.amax(rows, record=torch.is_grad_enabled())
            y = _EmulatedMatmul.apply(rows, weight, self, amax)
        else:
            self.ran_high += 1
            y = self._high_matmul(rows)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)

    def _high_matmul(self, rows: torch.Tensor) -> torch.Tensor:
        if self.trainable:
            return nn.functional.linear(rows, self.weight.to(rows.dtype))
        return dequantized_matmul(rows, lambda dtype: self.dequantize().to(dtype))

    def scaling_state(self) -> dict[str, torch.Tensor]:
        """Delayed scaling's amax histories."""
        histories = {"x": self.x_history.state(), "dy": self.dy_history.state()}
        return {name: state for name, state in histories.items() if state is not None}

    def load_scaling_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the amax histories."""
        self.x_history.load(state.get("x"))
        self.dy_history.load(state.get("dy"))


class _AmaxHistory:
    """One tensor's amax over the last steps, and the amax that this step's scale is made from."""

    def __init__(self, recipe: RecipeOptions) -> None:
        self.recipe = recipe
        self.past: list[torch.Tensor] = []  # newest last
        self.collecting: torch.Tensor | None = None
        self.used: torch.Tensor | None = None
        self.step = -1

    def amax(self, x: torch.Tensor, *, record: bool) -> torch.Tensor | None:
        """The amax to scale x with; None where the recipe looks at the tensor alone."""
        if self.recipe.recipe != "fp8_delayed":
            return None
        if self.step != _step:
            self._begin_step()
        own = amax_of(x)
        if record:
            seen = self.collecting
            self.collecting = own if seen is None else torch.maximum(seen, own)
        if self.used is None:
            if not self.past:
                return own
            newest_only = self.recipe.amax_compute_algo == "most_recent"
            self.used = self.past[-1] if newest_only else torch.stack(self.past).amax()
        return self.used

    def state(self) -> torch.Tensor | None:
        past = self.past if self.collecting is None else [*self.past, self.collecting]
        return torch.stack(past[-self.recipe.amax_history_len :]) if past else None

    def load(self, past: torch.Tensor | None) -> None:
        self.past = [] if past is None else list(past.unbind())
        self.collecting, self.used, self.step = None, None, -1

    def _begin_step(self) -> None:
        if self.collecting is not None:
            self.past = [*self.past, self.collecting][-self.recipe.amax_history_len :]
        self.collecting, self.used, self.step = None, None, _step


class _EmulatedMatmul(torch.autograd.Function):
    """The three products at the head of this file; weight is None where it is frozen."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        layer: EmulatedLinear,
        amax: torch.Tensor | None,
    ) -> torch.Tensor:
        quantized_x = quantize_rows(x, layer.recipe, amax=amax)
        ctx.layer = layer
        ctx.x_amax = amax
        ctx.save_for_backward(*_saved_for_backward(x, weight, quantized_x, layer.recipe))
        with torch.autocast(x.device.type, enabled=False):
            return (quantized_x.dequantize() @ layer.dequantize().t()).to(x.dtype)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dy: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        layer: EmulatedLinear = ctx.layer
        x, weight = ctx.saved_tensors or (None, None)  # once: a checkpoint unpacks only once
        amax = layer.dy_history.amax(dy, record=True)
        dx = dw = None
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = _input_gradient(dy, weight, layer, amax).to(dy.dtype)
            if ctx.needs_input_grad[1]:
                dw = _weight_gradient(dy, x, layer, amax, ctx.x_amax).to(layer.weight.dtype)
        return dx, dw, None, None


def _saved_for_backward(
    x: torch.Tensor, weight: torch.Tensor | None, quantized_x: Quantized, recipe: RecipeOptions
) -> tuple[torch.Tensor, ...]:
    """What dW needs: x itself, or under "dequantized" what the forward matmul saw; and W."""
    if weight is None:
        return ()
    return (quantized_x.dequantize() if recipe.backward_override == "dequantized" else x), weight


def _input_gradient(
    dy: torch.Tensor,
    weight: torch.Tensor | None,
    layer: EmulatedLinear,
    amax: torch.Tensor | None,
) -> torch.Tensor:
    """Dy W, summed over the out features; mxfp8 blocks a trained W along them anew."""
    recipe = layer.recipe
    if recipe.backward_override == "high_precision" and weight is not None:
        return dy.float() @ weight.float()
    if recipe.backward_override is not None:
        return dy.float() @ layer.dequantize()
    gradient = quantize_rows(dy, recipe, gradient=True, amax=amax).dequantize()
    if recipe.recipe == "mxfp8" and weight is not None:
        return gradient @ quantize_rows(weight.detach().t(), recipe).dequantize().t()
    return gradient @ layer.dequantize()


def _weight_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    layer: EmulatedLinear,
    amax: torch.Tensor | None,
    x_amax: torch.Tensor | None,
) -> torch.Tensor:
    """Dyᵀ x, summed over the tokens: blocks run along the tokens."""
    recipe = layer.recipe
    if recipe.backward_override is not None:
        return dy.t().float() @ x.float()
    gradient = quantize_rows(dy.t(), recipe, gradient=True, amax=amax)
    return gradient.dequantize() @ quantize_rows(x.t(), recipe, amax=x_amax).dequantize().t()

"""FP8 through PyTorch alone: `torch._scaled_mm` with row-wise scales, and Triton kernels.

No Transformer Engine is needed: what `pip install torch` brings on a CUDA machine is enough. The
recipe is current scaling at its finest grain that costs nothing on Hopper: one scale for each
token of x and dy, one for each output channel of W (see kernels/quantize.py). A frozen weight is
held once, in FP8, one byte a parameter, and serves the forward and the backward pass.

`convert` gives one linear at a time. `fuse_model` then goes further where a decoder layer has the
usual shape: it runs the whole layer, LoRA included, as one function with a written-out backward
pass (kernels/decoder.py), which is where the speed and most of the memory come from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from swiftfp8.plan import LayerPlan, RecipeOptions
from swiftfp8.precision._backend import (
    PrecisionLinear,
    compute_dtype,
    dequantized_matmul,
    pad_tokens,
)
from swiftfp8.precision.kernels import _triton
from swiftfp8.precision.kernels.decoder import Recompute
from swiftfp8.precision.kernels.group import Adapter, Group
from swiftfp8.precision.kernels.install import fuse_model
from swiftfp8.precision.kernels.quantize import (
    E4M3,
    dequantize_rows,
    quantize_rows,
    quantize_weight,
)
from swiftfp8.precision.kernels.trained import (
    Constants,
    quantize_trained,
    trained_matmul,
    trained_swiglu,
)

__all__ = [
    "NAME",
    "RECIPES",
    "available",
    "checkpoint",
    "compile_layers",
    "context",
    "convert",
    "finish",
    "fuse_model",
]

NAME = "torch"
RECIPES = frozenset({"fp8_current"})
_TOKEN_MULTIPLE = 16
_VARIANTS = 64


@lru_cache
def available() -> str | None:
    """Why `torch._scaled_mm` and Triton can't run FP8 here, or None where they can."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        major, minor = torch.cuda.get_device_capability()
        return f"FP8 matmuls need compute capability 8.9, this GPU has {major}.{minor}"
    if not hasattr(torch, "_scaled_mm"):
        return f"PyTorch {torch.__version__} has no _scaled_mm"
    return _triton.MISSING


def token_multiple(recipe: RecipeOptions | None) -> int:
    """Tokens per matmul are padded to a multiple of this, with rows of zeros."""
    return 1 if recipe is None else _TOKEN_MULTIPLE


def convert(linear: nn.Linear, layer: LayerPlan, recipe: RecipeOptions) -> PrecisionLinear:
    """The linear with FP8 matmuls, on the linear's own device."""
    if layer.trainable:
        return RowwiseTrainedLinear(linear, split_accumulator=recipe.split_accumulator)
    return RowwiseFrozenLinear(linear, split_accumulator=recipe.split_accumulator)


def context(recipe: RecipeOptions | None) -> AbstractContextManager[Any]:
    """Nothing is needed around a forward pass."""
    return nullcontext()


def finish(
    model: nn.Module, *, recompute: Recompute = "none", graphs: bool = False
) -> dict[str, str | None]:
    """Fuse the decoder layers that fit; returns each one's name with None, or why it was not."""
    return fuse_model(model, recompute=recompute, graphs=graphs)


def compile_layers(model: nn.Module, *, swiglu: bool) -> int:
    """Compile each decoder layer whose weights are trained; returns how many there are.

    The casts to FP8 then run inside the kernels of norms and of their gradients. `swiglu`: the
    layers' MLPs are known to be down(silu(gate) up) and no more, and run as one function.
    """
    # All layers share their code, and with it the variants (shapes, training or not, FP8 on or off)
    # that PyTorch keeps before it goes on uncompiled.
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _VARIANTS)
    layers = [m for m in model.modules() if hasattr(m, "self_attn") and hasattr(m, "mlp")]
    compiled = 0
    for layer in layers:
        linears = [m for m in layer.modules() if isinstance(m, RowwiseTrainedLinear)]
        if linears:
            if swiglu:
                _fuse_swiglu(layer.mlp)
            layer.forward = _counted(torch.compile(layer.forward), linears)
            compiled += 1
    return compiled


def _fuse_swiglu(mlp: nn.Module) -> None:
    linears = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if all(isinstance(m, RowwiseTrainedLinear) and m.bias is None for m in linears):
        mlp.forward = MethodType(_swiglu, mlp)  # type: ignore[method-assign]


def _swiglu(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not all(linear.enabled for linear in linears):
        return type(mlp).forward(mlp, x)
    weights = (gate.weight, up.weight, down.weight)
    constants = (gate.constants, up.constants, down.constants)
    return _by_rows(
        x, lambda rows: trained_swiglu(rows, weights, constants, gate.split_accumulator)
    )


def _by_rows(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """function(rows) for x [..., K] as rows [T, K] of the compute dtype, T padded: [..., N]."""
    rows = x.to(compute_dtype(x)).reshape(-1, x.shape[-1])
    y = function(pad_tokens(rows, _TOKEN_MULTIPLE))[: rows.shape[0]]
    return y.view(*x.shape[:-1], y.shape[-1])


def _counted(
    forward: Callable[..., Any], linears: list[RowwiseTrainedLinear]
) -> Callable[..., Any]:
    """Count passes outside of the compiled code, which would be compiled anew for each count."""

    def run(*args: Any, **kwargs: Any) -> Any:
        for linear in linears:
            linear.ran_fp8 += linear.enabled
            linear.ran_high += not linear.enabled
        return forward(*args, **kwargs)

    return run


def checkpoint(recipe: RecipeOptions | None) -> Callable[..., Any]:
    """PyTorch's non-reentrant activation checkpoint. Scales follow from the data alone."""
    return partial(torch_checkpoint, use_reentrant=False)


class RowwiseFrozenLinear(PrecisionLinear):
    """A weight held in FP8 alone, for LoRA's base and for inference.

    `weight_bits` are the bytes of e4m3, [out, in], which a cast of the module's dtype leaves
    alone; `weight_scale` is float32, [out].
    """

    def __init__(self, linear: nn.Linear, *, split_accumulator: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.split_accumulator = split_accumulator
        data, scale = quantize_weight(linear.weight.detach())
        self.register_buffer("weight_bits", data.view(torch.uint8), persistent=False)
        self.register_buffer("weight_scale", scale, persistent=False)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self._group: Group | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The e4m3 values, [out, in]."""
        return self.weight_bits.view(E4M3)

    def dequantize(self) -> torch.Tensor:
        """The weight that the matmul sees, [out_features, in_features], float32."""
        return dequantize_rows(self.weight, self.weight_scale)

    def weight_bytes(self) -> int:
        """Bytes of the values and the scales."""
        return self.weight_bits.nbytes + self.weight_scale.nbytes

    def hold(self, bits: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep these tensors, a merged weight's rows with the same values, in place of its own."""
        self.weight_bits, self.weight_scale, self._group = bits, scale, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Y = x Wᵀ + b, [..., out_features], in the compute dtype."""
        return self._run(x, None)

    def forward_lora(
        self,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        dropout: nn.Module,
    ) -> torch.Tensor:
        """The same + scaling · x Aᵀ Bᵀ, where LoRA reads the FP8 x too."""
        drops = not isinstance(dropout, nn.Identity) and dropout.training
        if drops or not self.enabled:
            return super().forward_lora(x, a, b, scaling, dropout)
        return self._run(x, Adapter(a=(a,), b=(b,), scaling=scaling))

    def _run(self, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
        dtype = compute_dtype(x)
        rows = x.to(dtype).reshape(-1, self.in_features)
        if self.enabled:
            self.ran_fp8 += 1
            tokens = rows.shape[0]
            group = self.group(adapter)
            tensors = () if adapter is None else adapter.tensors
            y = _FrozenMatmul.apply(pad_tokens(rows, _TOKEN_MULTIPLE), group, *tensors)[:tokens]
        else:
            self.ran_high += 1
            y = dequantized_matmul(rows, lambda to: self.dequantize().to(to))
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)

    def group(self, adapter: Adapter | None) -> Group:
        """The linear as a group of one."""
        stale = self._group is None or (
            self._group.weight8_NK.data_ptr() != self.weight_bits.data_ptr()
        )
        if stale:
            self._group = Group(
                weight8_NK=self.weight,
                scale_N=self.weight_scale.float(),  # whatever the module was cast to
                ends=(self.out_features,),
                split_accumulator=self.split_accumulator,
            )
        assert self._group is not None
        self._group.adapter = adapter
        return self._group


class RowwiseTrainedLinear(PrecisionLinear):
    """A trained weight in high precision, quantized anew in every pass: y, dx and dW in FP8."""

    def __init__(self, linear: nn.Linear, *, split_accumulator: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.split_accumulator = split_accumulator
        self.weight = linear.weight
        self.bias = linear.bias
        constants = Constants.of(linear.weight)
        self.register_buffer("least_scale", constants.least, persistent=False)
        self.register_buffer("ones", constants.ones, persistent=False)

    @property
    def constants(self) -> Constants:
        """What its matmuls need beside the weight."""
        # Scales are float32 for FP8 matmuls, whatever the module was cast to.
        return Constants(least=self.least_scale.float(), ones=self.ones.float())

    def dequantize(self) -> torch.Tensor:
        """The weight that the matmul sees, [out_features, in_features], float32."""
        return dequantize_rows(*quantize_trained(self.weight.detach(), self.constants.least))

    def weight_bytes(self) -> int:
        """Bytes of the trained weight."""
        return self.weight.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Y = x Wᵀ + b, [..., out_features], in the compute dtype."""
        if not torch.compiler.is_compiling():  # compile_layers counts
            self.ran_fp8 += self.enabled
            self.ran_high += not self.enabled
        y = _by_rows(x, self._matmul)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _matmul(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return nn.functional.linear(rows, self.weight.to(rows.dtype))
        return trained_matmul(rows, self.weight, self.constants, self.split_accumulator)


class _FrozenMatmul(torch.autograd.Function):
    """x Wᵀ with LoRA on it, W and the saved x in FP8."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_TK: torch.Tensor, group: Group, *adapter: torch.Tensor
    ) -> torch.Tensor:
        packed = group.pack(x_TK.dtype)
        x8, sx = quantize_rows(x_TK.detach().contiguous())
        y, xa = group.forward(x8, sx, packed, x_TK.dtype)
        # Without LoRA the backward pass needs W alone.
        ctx.save_for_backward(*((x8, sx, xa) if packed is not None else ()))
        # A copy: the module's own group is given another adapter by its next call.
        ctx.group, ctx.packed = _snapshot(group), packed
        return y

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        group, packed = ctx.group, ctx.packed
        x8, sx, xa = ctx.saved_tensors if packed is not None else (None, None, None)
        g8, sg = quantize_rows(dy_TN.contiguous(), group.fold_N)
        dx, gb, db = group.backward(
            g8, sg, xa, packed, dy_TN.dtype, need_dx=ctx.needs_input_grad[0]
        )
        return (dx, None, *group.gradients(x8, sx, gb, db))


def _snapshot(group: Group) -> Group:
    return Group(
        weight8_NK=group.weight8_NK,
        scale_N=group.scale_N,
        ends=group.ends,
        adapter=group.adapter,
        split_accumulator=group.split_accumulator,
    )

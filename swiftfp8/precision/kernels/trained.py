"""Matmuls with trained weights: y, dx and dW in FP8, each operand cast once for two of them.

    x8, s_x = rows of x       w8, s_w = rows of W       y  = s_x s_w (x8 w8ᵀ)
    d8, s_d = rows of dy s_w                            dx = s_d (d8 w8)
    dW = dyᵀ x = (1 / s_w) Σ_t d8[t] (s_d[t] x[t])

dW sums over tokens, along which no scale may vary, so d8's scales go into x before it is cast with
one scale for all of it. That needs no look at dy in high precision: its bytes are turned as they
are, and the largest s_d x follows from the scales of both.

A channel whose weights are all but zero would give dy s_w, and with it its own gradient, nothing:
no s_w is below `least`, 1/256 of the largest when training begins. e4m3 keeps a channel's values
whole down to there and beyond.

A host that launches too slowly lets a small model's GPU wait, so what needs no kernel has none:
`least` and the ones that stand for a scale of no operand are made once.

SwiGLU's three matmuls run as one function: the product is never written in high precision, and its
gradient goes from registers to d8. dW of down has m8 = rows of the product, so there s_m goes into
dy in place of s_d into the product.
"""

from dataclasses import dataclass
from typing import Any

import torch

from swiftfp8.precision.kernels.quantize import (
    E4M3,
    E4M3_MAX,
    quantize_rows,
    quantize_rows_reference,
    scaled_mm,
)
from swiftfp8.precision.kernels.swiglu import swiglu_rows_backward_op, swiglu_rows_op
from swiftfp8.precision.kernels.transpose import cast_transpose_op, transpose8_op

Rows = tuple[torch.Tensor, torch.Tensor]  # e4m3 rows and their scales, [T, 1]
# Below any product of two scales that means something, and its inverse is finite.
_TINY_PRODUCT = 1e-37


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Of one linear: its weight's smallest scale, [1], and ones, as many as its longer side."""

    least: torch.Tensor
    ones: torch.Tensor

    @classmethod
    def of(cls, weight_NK: torch.Tensor) -> "Constants":
        """For a weight as it is before training; one of zeros will grow."""
        peak = weight_NK.detach().abs().amax().float().clamp(min=1e-3).view(1)
        ones = torch.ones(max(weight_NK.shape), device=weight_NK.device)
        return cls(least=peak / (256 * E4M3_MAX), ones=ones)


def trained_matmul(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    constants: Constants,
    split_accumulator: bool = False,
) -> torch.Tensor:
    """x Wᵀ, [T, N], differentiable in both; T is a multiple of 16."""
    return _Matmul.apply(x_TK, weight_NK, constants.least, constants.ones, split_accumulator)


def trained_swiglu(
    x_TK: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    constants: tuple[Constants, Constants, Constants],
    split_accumulator: bool = False,
) -> torch.Tensor:
    """(silu(x Wgᵀ) · x Wuᵀ) Wdᵀ, [T, K], differentiable in x and all weights; T as above.

    `weights` are gate's and up's, [I, K], and down's, [K, I].
    """
    least = [one.least for one in constants]
    return _SwiGlu.apply(x_TK, *weights, *least, constants[0].ones, split_accumulator)


def quantize_trained(weight_NK: torch.Tensor, least: torch.Tensor) -> Rows:
    """A weight's e4m3 rows and scales [N, 1]."""
    return _quantize(weight_NK, None, least)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        least: torch.Tensor,
        ones: torch.Tensor,
        split_accumulator: bool,
    ) -> torch.Tensor:
        x8, sx = _quantize(x_TK)
        w8, sw = quantize_trained(weight_NK, least)
        ctx.save_for_backward(x_TK, sx, weight_NK, least, ones)
        ctx.split = split_accumulator
        return scaled_mm(x8, sx, w8, sw, split_accumulator=split_accumulator, dtype=x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, sx, weight, least, ones = ctx.saved_tensors
        w8, sw = quantize_trained(weight, least)
        d8, sd = _quantize(dy_TN, sw[:, 0])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _matmul(d8, sd, transpose8_op(w8), ones, ctx.split, dy_TN.dtype)
        if ctx.needs_input_grad[1]:
            x8_KT, s = _columns(x, sx, sd)
            dw = _matmul(transpose8_op(d8), s / sw, x8_KT, ones, ctx.split, dy_TN.dtype)
            dw = dw.to(weight.dtype)
        return dx, dw, None, None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_TK: torch.Tensor,
        gate_IK: torch.Tensor,
        up_IK: torch.Tensor,
        down_KI: torch.Tensor,
        least_gate: torch.Tensor,
        least_up: torch.Tensor,
        least_down: torch.Tensor,
        ones: torch.Tensor,
        split_accumulator: bool,
    ) -> torch.Tensor:
        x8, sx = _quantize(x_TK)
        gate, up = quantize_trained(gate_IK, least_gate), quantize_trained(up_IK, least_up)
        w8, sw = _side_by_side(gate, up)
        gate_up = scaled_mm(x8, sx, w8, sw, split_accumulator=split_accumulator, dtype=x_TK.dtype)
        m8, sm = swiglu_rows_op(gate_up)
        down8, sdown = quantize_trained(down_KI, least_down)
        kept = (x_TK, sx, gate_up, sm, gate_IK, up_IK, down_KI, ones)
        ctx.save_for_backward(*kept, least_gate, least_up, least_down)
        ctx.split = split_accumulator
        return scaled_mm(
            m8, sm, down8, sdown, split_accumulator=split_accumulator, dtype=x_TK.dtype
        )

    @staticmethod
    def backward(ctx: Any, dy_TK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, sx, gate_up, sm, gate, up, down, ones, *least = ctx.saved_tensors
        split, dtype, inner = ctx.split, dy_TK.dtype, gate.shape[0]
        down8, sdown = quantize_trained(down, least[2])
        g8, sg = _quantize(dy_TK, sdown[:, 0])
        dm = _matmul(g8, sg, transpose8_op(down8), ones, split, dtype)
        w8, sw = _side_by_side(quantize_trained(gate, least[0]), quantize_trained(up, least[1]))
        d8, sd, m8 = swiglu_rows_backward_op(dm, gate_up, sm, sw[:, 0])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _matmul(d8, sd, transpose8_op(w8), ones, split, dtype)
        peak = dy_TK.abs().amax(-1, keepdim=True).float()
        dy8_KT, s = _columns(dy_TK, peak / E4M3_MAX, sm)
        scale = s * ones[: dy8_KT.shape[0], None]
        ddown = _matmul(dy8_KT, scale, transpose8_op(m8), ones, split, dtype)
        x8_KT, s = _columns(x, sx, sd)
        d8_NT, scale = transpose8_op(d8), s / sw
        dgate, dup = (
            _matmul(d8_NT[rows], scale[rows], x8_KT, ones, split, dtype)
            for rows in (slice(inner), slice(inner, None))
        )
        dweights = [dw.to(w.dtype) for dw, w in ((dgate, gate), (dup, up), (ddown, down))]
        return dx, *dweights, None, None, None, None, None


def _matmul(
    a8_MK: torch.Tensor,
    sa_M1: torch.Tensor,
    b8_NK: torch.Tensor,
    ones: torch.Tensor,
    split: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """s_a (a8 b8ᵀ), [M, N], where b8 has no scales that were not folded into a8's."""
    ones = ones[: b8_NK.shape[0]]
    return scaled_mm(a8_MK, sa_M1, b8_NK, ones, split_accumulator=split, dtype=dtype)


def _columns(x_TK: torch.Tensor, sx_T1: torch.Tensor, factor_T1: torch.Tensor) -> Rows:
    """e4m3 of (x * factor)ᵀ under one scale: [K, T] and the scale; s_x is x's by rows."""
    scale = (sx_T1 * factor_T1).amax().clamp(min=_TINY_PRODUCT)
    return cast_transpose_op(x_TK, (factor_T1 / scale)[:, 0]), scale


def _side_by_side(first: Rows, second: Rows) -> Rows:
    """Two weights' rows as one's."""
    bits = torch.cat([first[0].view(torch.uint8), second[0].view(torch.uint8)])
    return bits.view(E4M3), torch.cat([first[1], second[1]])


def _quantize(
    x_TK: torch.Tensor,
    col_scale_K: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
) -> Rows:
    """`quantize_rows`, spelled out where torch.compile can fuse it with what made x."""
    if torch.compiler.is_compiling():
        return quantize_rows_reference(x_TK, col_scale_K, floor)
    return quantize_rows(x_TK.contiguous(), col_scale_K, floor)

"""Matmuls with trained weights: y, dx and dW in FP8, each operand cast once for two of them.

    x8, s_x = rows of x       w8, s_w = rows of W       y  = s_x s_w (x8 w8ᵀ)
    d8, s_d = rows of dy s_w                            dx = s_d (d8 w8)
    dW = dyᵀ x = (1 / s_w) Σ_t d8[t] (s_d[t] x[t])

dW sums over tokens, along which no scale may vary, so d8's scales go into x before it is cast with
one scale for all of it. That needs no look at dy in high precision: its bytes are turned as they
are, and the largest s_d x follows from the scales of both.

A channel whose weights are all but zero would give dy s_w, and with it its own gradient, nothing:
no s_w is below 1/256 of the largest. e4m3 keeps a channel's values whole down to there and beyond.

SwiGLU's three matmuls run as one function: the product is never written in high precision, and its
gradient goes from registers to d8. dW of down has m8 = rows of the product, so there s_m goes into
dy in place of s_d into the product.
"""

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
_LEAST = 1 / 256
# Below any product of two scales that means something, and its inverse is finite.
_TINY_PRODUCT = 1e-37


def trained_matmul(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, split_accumulator: bool = False
) -> torch.Tensor:
    """x Wᵀ, [T, N], differentiable in both; T is a multiple of 16."""
    return _Matmul.apply(x_TK, weight_NK, split_accumulator)


def trained_swiglu(
    x_TK: torch.Tensor,
    gate_IK: torch.Tensor,
    up_IK: torch.Tensor,
    down_KI: torch.Tensor,
    split_accumulator: bool = False,
) -> torch.Tensor:
    """(silu(x Wgᵀ) · x Wuᵀ) Wdᵀ, [T, K], differentiable in all four; T is a multiple of 16."""
    return _SwiGlu.apply(x_TK, gate_IK, up_IK, down_KI, split_accumulator)


def quantize_trained(weight_NK: torch.Tensor) -> Rows:
    """A weight's e4m3 rows and scales [N, 1]."""
    least, most = torch.aminmax(weight_NK)
    peak = torch.maximum(-least, most).float()
    return _quantize(weight_NK, None, peak * (_LEAST / E4M3_MAX))


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_TK: torch.Tensor, weight_NK: torch.Tensor, split_accumulator: bool
    ) -> torch.Tensor:
        x8, sx = _quantize(x_TK)
        w8, sw = quantize_trained(weight_NK)
        ctx.save_for_backward(x_TK, sx, weight_NK)
        ctx.split = split_accumulator
        return scaled_mm(x8, sx, w8, sw, split_accumulator=split_accumulator, dtype=x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_TN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, sx, weight = ctx.saved_tensors
        w8, sw = quantize_trained(weight)
        d8, sd = _quantize(dy_TN, sw[:, 0])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _back(d8, sd, w8, ctx.split, dy_TN.dtype)
        if ctx.needs_input_grad[1]:
            x8_KT, s = _columns(x, sx, sd)
            dw = _weight_gradient(transpose8_op(d8), 1 / sw, x8_KT, s, ctx.split, weight.dtype)
        return dx, dw, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_TK: torch.Tensor,
        gate_IK: torch.Tensor,
        up_IK: torch.Tensor,
        down_KI: torch.Tensor,
        split_accumulator: bool,
    ) -> torch.Tensor:
        x8, sx = _quantize(x_TK)
        w8, sw = _side_by_side(quantize_trained(gate_IK), quantize_trained(up_IK))
        gate_up = scaled_mm(x8, sx, w8, sw, split_accumulator=split_accumulator, dtype=x_TK.dtype)
        m8, sm = swiglu_rows_op(gate_up)
        down8, sdown = quantize_trained(down_KI)
        ctx.save_for_backward(x_TK, sx, gate_up, sm, gate_IK, up_IK, down_KI)
        ctx.split = split_accumulator
        return scaled_mm(
            m8, sm, down8, sdown, split_accumulator=split_accumulator, dtype=x_TK.dtype
        )

    @staticmethod
    def backward(ctx: Any, dy_TK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, sx, gate_up, sm, gate, up, down = ctx.saved_tensors
        split, dtype, inner = ctx.split, dy_TK.dtype, gate.shape[0]
        down8, sdown = quantize_trained(down)
        g8, sg = _quantize(dy_TK, sdown[:, 0])
        dm = _back(g8, sg, down8, split, dtype)
        w8, sw = _side_by_side(quantize_trained(gate), quantize_trained(up))
        d8, sd, m8 = swiglu_rows_backward_op(dm, gate_up, sm, sw[:, 0])
        dx = _back(d8, sd, w8, split, dtype) if ctx.needs_input_grad[0] else None
        peak = dy_TK.abs().amax(-1, keepdim=True).float()
        dy8_KT, s = _columns(dy_TK, peak / E4M3_MAX, sm)
        ones = torch.ones(inner, device=dy_TK.device)
        ddown = _weight_gradient(
            dy8_KT, s.expand(dy8_KT.shape[0], 1), transpose8_op(m8), ones, split, down.dtype
        )
        x8_KT, s = _columns(x, sx, sd)
        d8_NT, out = transpose8_op(d8), 1 / sw
        dgate, dup = (
            _weight_gradient(d8_NT[rows], out[rows], x8_KT, s, split, gate.dtype)
            for rows in (slice(inner), slice(inner, None))
        )
        return dx, dgate, dup, ddown, None


def _back(
    d8_TN: torch.Tensor, sd_T1: torch.Tensor, w8_NK: torch.Tensor, split: bool, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of a matmul's input, [T, K]."""
    ones = torch.ones(w8_NK.shape[1], device=d8_TN.device)
    return scaled_mm(d8_TN, sd_T1, transpose8_op(w8_NK), ones, split_accumulator=split, dtype=dtype)


def _columns(x_TK: torch.Tensor, sx_T1: torch.Tensor, factor_T1: torch.Tensor) -> Rows:
    """e4m3 of (x * factor)ᵀ under one scale: [K, T] and the scale; s_x is x's by rows."""
    scale = (sx_T1 * factor_T1).amax().clamp(min=_TINY_PRODUCT)
    return cast_transpose_op(x_TK, (factor_T1 / scale)[:, 0]), scale


def _weight_gradient(
    d8_NT: torch.Tensor,
    sd_N1: torch.Tensor,
    x8_KT: torch.Tensor,
    sx: torch.Tensor,
    split: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    return scaled_mm(
        d8_NT,
        sd_N1.contiguous(),
        x8_KT,
        sx.expand(x8_KT.shape[0]).contiguous(),
        split_accumulator=split,
        dtype=dtype,
    )


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

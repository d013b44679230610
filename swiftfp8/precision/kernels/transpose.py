"""Wᵀ of an FP8 weight, made when a backward pass needs it and freed right after.

Hopper's FP8 tensor cores multiply rows by rows only (TN), so dx = g8 W8 needs W8ᵀ [K, N] in memory.
Keeping it would double the frozen weights; PyTorch's copy of a transposed 8-bit tensor runs at a
tenth of the memory's speed; tiles of 128 x 128 through shared memory cost 1-2% of a step.

dW = dyᵀ x sums over tokens, so both operands are needed with tokens as columns: dy's bytes are
turned as they are, x is scaled, cast and turned in one pass. `torch.compile` sees both functions as
operators that it leaves alone.
"""

from typing import Any

import torch

from swiftfp8.precision.kernels._triton import (
    ceil_div,
    jit,
    operator,
    runs_triton,
    tl,
    traced,
)
from swiftfp8.precision.kernels.quantize import E4M3, E4M3_MAX, to_e4m3


def transpose8(w8_NK: torch.Tensor) -> torch.Tensor:
    """Wᵀ, [K, N], contiguous; any 1-byte dtype."""
    return _turned(w8_NK, _transpose)


def _turned(w8_NK: torch.Tensor, kernel: Any) -> torch.Tensor:
    if not runs_triton(w8_NK):
        return w8_NK.t().contiguous()
    rows, columns = w8_NK.shape
    assert w8_NK.is_contiguous() and w8_NK.element_size() == 1
    out = torch.empty(columns, rows, dtype=torch.uint8, device=w8_NK.device)
    kernel[(ceil_div(columns, 128), ceil_div(rows, 128))](
        w8_NK.view(torch.uint8), out, rows, columns, BLOCK=128, num_warps=8
    )
    return out.view(w8_NK.dtype)


def _cast_turned(x_TC: torch.Tensor, factor_T: torch.Tensor, kernel: Any) -> torch.Tensor:
    if not runs_triton(x_TC):
        scaled = (x_TC.float() * factor_T[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
        return scaled.t().contiguous().to(E4M3)
    tokens, columns = x_TC.shape
    assert x_TC.is_contiguous()
    out = torch.empty(columns, tokens, dtype=E4M3, device=x_TC.device)
    kernel[(ceil_div(columns, 64), ceil_div(tokens, 128))](
        x_TC, factor_T, out, tokens, columns, BT=128, BC=64, num_warps=4
    )
    return out


@operator("transpose8")
def transpose8_op(w8_NK: torch.Tensor) -> torch.Tensor:
    """`transpose8` for code that is compiled, which launches the kernel by itself."""
    return _turned(w8_NK, traced(_transpose))


@operator("cast_transpose")
def cast_transpose_op(x_TC: torch.Tensor, factor_T: torch.Tensor) -> torch.Tensor:
    """e4m3 of (x * factor)ᵀ, [C, T]; `factor` is float32, one for each token."""
    return _cast_turned(x_TC, factor_T, traced(_cast_transpose))


@jit
def _transpose(W, OUT, N, K, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(
        W + n[:, None].to(tl.int64) * K + k[None, :],
        mask=(n[:, None] < N) & (k[None, :] < K),
        other=0,
    )
    tl.store(
        OUT + k[:, None].to(tl.int64) * N + n[None, :],
        tl.trans(tile),
        mask=(k[:, None] < K) & (n[None, :] < N),
    )


@jit
def _cast_transpose(X, F, OUT, T, C, BT: tl.constexpr, BC: tl.constexpr):
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    x = tl.load(
        X + t[:, None].to(tl.int64) * C + c[None, :],
        mask=(t[:, None] < T) & (c[None, :] < C),
        other=0.0,
    ).to(tl.float32)
    factor = tl.load(F + t, mask=t < T, other=0.0)
    x = tl.minimum(tl.maximum(x * factor[:, None], -448.0), 448.0)
    tl.store(
        OUT + c[:, None].to(tl.int64) * T + t[None, :],
        tl.trans(to_e4m3(x)),
        mask=(c[:, None] < C) & (t[None, :] < T),
    )

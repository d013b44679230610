"""Wᵀ of an FP8 weight, made when a backward pass needs it and freed right after.

Hopper's FP8 tensor cores multiply rows by rows only (TN), so dx = g8 W8 needs W8ᵀ [K, N] in memory.
Keeping it would double the frozen weights; PyTorch's copy of a transposed 8-bit tensor runs at a
tenth of the memory's speed; tiles of 128 x 128 through shared memory cost 1-2% of a step.
"""

import torch

from swiftfp8.precision.kernels._triton import ceil_div, jit, runs_triton, tl


def transpose8(w8_NK: torch.Tensor) -> torch.Tensor:
    """Wᵀ, [K, N], contiguous; any 1-byte dtype."""
    if not runs_triton(w8_NK):
        return w8_NK.t().contiguous()
    rows, columns = w8_NK.shape
    assert w8_NK.is_contiguous() and w8_NK.element_size() == 1
    out = torch.empty(columns, rows, dtype=w8_NK.dtype, device=w8_NK.device)
    _transpose[(ceil_div(columns, 128), ceil_div(rows, 128))](
        w8_NK.view(torch.uint8), out.view(torch.uint8), rows, columns, BLOCK=128, num_warps=8
    )
    return out


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

"""LoRA's thin matmuls, reading the FP8 tensors that the base matmuls read anyway.

A group of linears that read one x (q, k, v or gate, up) is merged: A [R, K] stacks their A's, R
the sum of their ranks r; B [N, r] stacks their scaled B's, each row block with its own columns of
x Aᵀ. `ends` are the blocks' ends in N: block i covers rows ends[i-1]..ends[i] of B and columns
i r..(i+1) r of `xa`. With x = x8 sx, and g8 sg = rows of dy * s_w (see quantize.py):

    y += xa_i B_iᵀ                     [T, N]   add_product_(y, xa, B)
    dx += gb A                         [T, K]   add_product_(dx, gb, Aᵀ)
    dB_i = dy_iᵀ xa_i = 1/s_w (g8ᵀ (sg xa))_i  [N, r]   gather_columns(g8, sg, xa)
    dA = gbᵀ x = ((x8ᵀ (sx gb)))ᵀ       [R, K]   gather_columns(x8, sx, gb)

where xa = x Aᵀ and gb_i = dy_i B_i come from thin.py. Every one of them is bound by reading or
writing its [T, N] operand once. FP8 values are widened to BF16 on load, exactly; sums are float32.
"""

from collections.abc import Sequence

import torch

from swiftfp8.precision.kernels._triton import (
    INTERPRETED,
    ceil_div,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
)
from swiftfp8.precision.kernels.quantize import dequantize_rows

_INTERPRETED_SPLITS = 2
# Triton's interpreter has no inline assembly.
_INTERPRETED = tl.constexpr(INTERPRETED) if tl.constexpr is not object else INTERPRETED


def add_product_(
    y_TN: torch.Tensor,
    z_TR: torch.Tensor,
    m_NJ: torch.Tensor,
    ends: Sequence[int] | None = None,
    residual_TN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y += z_i M_iᵀ (+ residual), in place, block by block of M's rows. Returns y."""
    tokens, columns = y_TN.shape
    ends = [columns] if ends is None else list(ends)
    rank = m_NJ.shape[1]
    if not runs_triton(y_TN):
        return _add_product_reference(y_TN, z_TR, m_NJ, ends, residual_TN)
    assert y_TN.is_contiguous()
    starts = [0, *ends[:-1]]
    tiles = sum(ceil_div(b - a, 128) for a, b in zip(starts, ends, strict=True))
    _add_product[(tiles, ceil_div(tokens, 64))](
        y_TN,
        y_TN if residual_TN is None else residual_TN,
        z_TR,
        m_NJ,
        tokens,
        columns,
        *three_ends(ends),
        z_TR.stride(0),
        m_NJ.stride(0),
        m_NJ.stride(1),
        RESIDUAL=residual_TN is not None,
        J=rank,
        JP=max(16, next_power_of_2(rank)),
        BT=64,
        BN=128,
        num_warps=4 if residual_TN is not None else 8,
    )
    return y_TN


def gather_columns(
    x8_TC: torch.Tensor,
    scale_T1: torch.Tensor,
    z_TR: torch.Tensor,
    ends: Sequence[int] | None = None,
    out_scale_C: torch.Tensor | None = None,
    alpha: float = 1.0,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """alpha * out_scale * (x8ᵀ (scale z))_i, block by block of x8's columns: float32 [C, J].

    With `transposed` it is written as [J, C], as a LoRA A is stored. Sums over tokens are split
    among programs, and the parts added in a fixed order.
    """
    tokens, columns = x8_TC.shape
    ends = [columns] if ends is None else list(ends)
    rank = z_TR.shape[1] // len(ends)
    if not runs_triton(x8_TC):
        parts = enumerate(zip([0, *ends[:-1]], ends, strict=True))
        x, z = dequantize_rows(x8_TC, scale_T1), z_TR.float()
        out = torch.cat([x[:, a:b].t() @ z[:, i * rank : (i + 1) * rank] for i, (a, b) in parts])
        out = out * alpha if out_scale_C is None else out * (alpha * out_scale_C[:, None])
        return out.t().contiguous() if transposed else out
    starts = [0, *ends[:-1]]
    tiles = sum(ceil_div(b - a, 128) for a, b in zip(starts, ends, strict=True))
    splits = _splits(tiles, tokens) if x8_TC.is_cuda else _INTERPRETED_SPLITS
    shape = (rank, columns) if transposed else (columns, rank)
    partial = torch.empty(splits, *shape, dtype=torch.float32, device=x8_TC.device)
    _gather_columns[(tiles, splits)](
        x8_TC,
        scale_T1,
        z_TR,
        scale_T1 if out_scale_C is None else out_scale_C,
        partial,
        tokens,
        columns,
        *three_ends(ends),
        alpha,
        ceil_div(ceil_div(tokens, splits), 64) * 64,
        z_TR.stride(0),
        *((1, columns) if transposed else (rank, 1)),
        SCALE=out_scale_C is not None,
        J=rank,
        JP=max(16, next_power_of_2(rank)),
        BT=64,
        BC=128,
        num_warps=4,
        num_stages=3,
    )
    return partial[0] if splits == 1 else partial.sum(0)


def _splits(tiles: int, tokens: int) -> int:
    """Programs along the tokens: their loops are short of loads in flight, so many must run."""
    return max(1, min(32, ceil_div(1024, tiles), tokens // 256))


def three_ends(ends: Sequence[int]) -> tuple[int, int, int]:
    """The ends of up to three blocks, the last one repeated."""
    assert 1 <= len(ends) <= 3
    return (ends[0], ends[min(1, len(ends) - 1)], ends[-1])


def _add_product_reference(
    y_TN: torch.Tensor,
    z_TR: torch.Tensor,
    m_NJ: torch.Tensor,
    ends: Sequence[int],
    residual_TN: torch.Tensor | None,
) -> torch.Tensor:
    rank, start = m_NJ.shape[1], 0
    for i, end in enumerate(ends):
        z = z_TR[:, i * rank : (i + 1) * rank].float()
        y_TN[:, start:end] = (y_TN[:, start:end].float() + z @ m_NJ[start:end].float().t()).to(
            y_TN.dtype
        )
        start = end
    if residual_TN is not None:
        y_TN += residual_TN
    return y_TN


@jit
def _add_product(
    Y, RES, Z, M, T, N, E0, E1, E2, zt, mn, mj,
    RESIDUAL: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block, start, end = block_of(tl.program_id(0), E0, E1, E2, BN)
    n = start + tl.arange(0, BN)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    j = tl.arange(0, JP)
    z = tl.load(
        Z + t[:, None] * zt + block * J + j[None, :],
        mask=(t[:, None] < T) & (j[None, :] < J),
        other=0.0,
    )
    m = tl.load(
        M + n[None, :].to(tl.int64) * mn + j[:, None] * mj,
        mask=(n[None, :] < end) & (j[:, None] < J),
        other=0.0,
    )
    mask = (t[:, None] < T) & (n[None, :] < end)
    place = t[:, None].to(tl.int64) * N + n[None, :]
    y = tl.load(Y + place, mask=mask, other=0.0).to(tl.float32) + tl.dot(z, m)
    if RESIDUAL:
        y += tl.load(RES + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + place, y.to(Y.dtype.element_ty), mask=mask)


@jit
def _gather_columns(
    X8, S, Z, OSCALE, OUT, T, C, E0, E1, E2, alpha, span, zt, oc, oj,
    SCALE: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    block, start, end = block_of(tl.program_id(0), E0, E1, E2, BC)
    split = tl.program_id(1)
    c = start + tl.arange(0, BC)
    j = tl.arange(0, JP)
    sums = tl.zeros((JP, BC), tl.float32)
    last = tl.minimum(split * span + span, T)
    for first in range(split * span, last, BT):
        t = first + tl.arange(0, BT)
        x = tl.load(
            X8 + t[:, None].to(tl.int64) * C + c[None, :],
            mask=(t[:, None] < last) & (c[None, :] < end),
            other=0.0,
        )
        z = tl.load(
            Z + t[:, None] * zt + block * J + j[None, :],
            mask=(t[:, None] < last) & (j[None, :] < J),
            other=0.0,
        )
        s = tl.load(S + t, mask=t < last, other=0.0)
        z = (z.to(tl.float32) * (s * 2.0**96)[:, None]).to(tl.bfloat16)
        sums = tl.dot(tl.trans(z), _shrunk_bf16(x), sums)
    sums = sums * (2.0**24 * alpha)
    if SCALE:
        sums = sums * tl.load(OSCALE + c, mask=c < end, other=0.0)[None, :]
    tl.store(
        OUT + split.to(tl.int64) * C * J + c[None, :] * oc + j[:, None] * oj,
        sums,
        mask=(c[None, :] < end) & (j[:, None] < J),
    )


@jit
def _shrunk_bf16(x8):
    """x8 * 2^-120 in BF16: e4m3's bits in their place under BF16's larger exponent bias.

    Four integer instructions for two values, where the GPU's conversion by way of FP16 and float32
    takes twice the time of the whole loop's loads.
    """
    if _INTERPRETED:
        return (x8.to(tl.float32) * 2.0**-120).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, rest;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 rest, low, 4;
        and.b32 rest, rest, 0x07f007f0;
        and.b32 low, low, 0x80008000;
        or.b32 $0, low, rest;
        shr.u32 rest, high, 4;
        and.b32 rest, rest, 0x07f007f0;
        and.b32 high, high, 0x80008000;
        or.b32 $1, high, rest;
        }""",
        "=r,=r,r",
        [x8.to(tl.uint8, bitcast=True)],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@jit
def block_of(tile, E0, E1, E2, BN: tl.constexpr):
    """Which block of columns a tile lies in, where the tile begins, where the block ends."""
    first = tl.cdiv(E0, BN)
    second = first + tl.cdiv(E1 - E0, BN)
    in_second = tile >= first
    in_third = tile >= second
    block = in_second.to(tl.int32) + in_third.to(tl.int32)
    start = tl.where(
        in_third,
        E1 + (tile - second) * BN,
        tl.where(in_second, E0 + (tile - first) * BN, tile * BN),
    )
    end = tl.where(in_third, E2, tl.where(in_second, E1, E0))
    return block, start, end

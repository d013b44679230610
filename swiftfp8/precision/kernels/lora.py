"""LoRA's thin matmuls, reading the FP8 tensors that the base matmuls read anyway.

A group of linears that read one x (q, k, v or gate, up) is merged: A [R, K] stacks their A's, R
the sum of their ranks r; B [N, r] stacks their scaled B's, each row block with its own columns of
x Aᵀ. `ends` are the blocks' ends in N: block i covers rows ends[i-1]..ends[i] of B and columns
i r..(i+1) r of `xa`. With x = x8 sx, and g8 sg = rows of dy * s_w (see quantize.py):

    xa = sx (x8 Aᵀ)                    [T, R]   project_rows(x8, sx, A)
    y += xa_i B_iᵀ                     [T, N]   add_product_(y, xa, B)
    gb_i = dy_i B_i = sg (g8_i (B/s_w)_i)  [T, R]   project_rows(g8, sg, B/s_w)
    dx += gb A                         [T, K]   add_product_(dx, gb, Aᵀ)
    dB_i = dy_iᵀ xa_i = 1/s_w (g8ᵀ (sg xa))_i  [N, r]   gather_columns(g8, sg, xa)
    dA = gbᵀ x = ((x8ᵀ (sx gb)))ᵀ       [R, K]   gather_columns(x8, sx, gb)

Every one of them is bound by reading or writing its [T, N] operand once. FP8 values are widened to
BF16 on load, exactly; sums are float32.
"""

from collections.abc import Sequence

import torch

from swiftfp8.precision.kernels._triton import ceil_div, jit, next_power_of_2, runs_triton, tl
from swiftfp8.precision.kernels.quantize import dequantize_rows

_INTERPRETED_SPLITS = 2


def project_rows(
    x8_TC: torch.Tensor,
    scale_T1: torch.Tensor,
    m_CJ: torch.Tensor,
    ends: Sequence[int] | None = None,
) -> torch.Tensor:
    """scale * (x8 M) block by block of M's rows, [T, blocks * J]. M may be a transposed view."""
    tokens, columns = x8_TC.shape
    ends = [columns] if ends is None else list(ends)
    rank = m_CJ.shape[1]
    if not runs_triton(x8_TC):
        parts = zip([0, *ends[:-1]], ends, strict=True)
        x = dequantize_rows(x8_TC, scale_T1)
        return torch.cat([x[:, a:b] @ m_CJ[a:b].float() for a, b in parts], -1).to(m_CJ.dtype)
    out = torch.empty(tokens, len(ends) * rank, dtype=m_CJ.dtype, device=x8_TC.device)
    _project_rows[(ceil_div(tokens, 64), len(ends))](
        x8_TC,
        scale_T1,
        m_CJ,
        out,
        tokens,
        columns,
        *_three(ends),
        m_CJ.stride(0),
        m_CJ.stride(1),
        J=rank,
        JP=max(16, next_power_of_2(rank)),
        BT=64,
        BC=128,
        num_warps=4,
        num_stages=4,
    )
    return out


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
        *_three(ends),
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
    tiles = sum(ceil_div(b - a, 64) for a, b in zip(starts, ends, strict=True))
    splits = _splits(tiles, tokens, rank) if x8_TC.is_cuda else _INTERPRETED_SPLITS
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
        *_three(ends),
        alpha,
        ceil_div(ceil_div(tokens, splits), 64) * 64,
        z_TR.stride(0),
        *((1, columns) if transposed else (rank, 1)),
        SCALE=out_scale_C is not None,
        J=rank,
        JP=max(16, next_power_of_2(rank)),
        BT=64,
        BC=64,
        num_warps=4,
        num_stages=3,
    )
    return partial[0] if splits == 1 else partial.sum(0)


def scale_columns(
    b_Nr: torch.Tensor, inverse_scale_N: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """B * scaling, and B * scaling / s_w, both [N, r] in `dtype`."""
    if not runs_triton(b_Nr):
        scaled = b_Nr.float() * scaling
        return scaled.to(dtype), (scaled * inverse_scale_N[:, None]).to(dtype)
    rows, rank = b_Nr.shape
    assert b_Nr.is_contiguous()
    out = torch.empty(2, rows, rank, dtype=dtype, device=b_Nr.device)
    _scale_columns[(ceil_div(rows * rank, 1024),)](
        b_Nr, inverse_scale_N, out, rows * rank, scaling, rank, BLOCK=1024, num_warps=4
    )
    return out[0], out[1]


def _splits(tiles: int, tokens: int, rank: int) -> int:
    """Programs along the tokens: their loops are short of loads in flight, so many must run."""
    return max(1, min(32 if rank <= 16 else 16, 2600 // tiles, tokens // 256))


def _three(ends: Sequence[int]) -> tuple[int, int, int]:
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
def _project_rows(
    X8, S, M, OUT, T, C, E0, E1, E2, mc, mj,
    J: tl.constexpr, JP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    block = tl.program_id(1)
    start = tl.where(block == 0, 0, tl.where(block == 1, E0, E1))
    end = tl.where(block == 0, E0, tl.where(block == 1, E1, E2))
    j = tl.arange(0, JP)
    sums = tl.zeros((BT, JP), tl.float32)
    rows = X8 + t[:, None].to(tl.int64) * C
    for first in range(start, end, BC):
        c = first + tl.arange(0, BC)
        x = tl.load(rows + c[None, :], mask=(t[:, None] < T) & (c[None, :] < end), other=0.0)
        m = tl.load(
            M + c[:, None].to(tl.int64) * mc + j[None, :] * mj,
            mask=(c[:, None] < end) & (j[None, :] < J),
            other=0.0,
        )
        sums = tl.dot(x.to(M.dtype.element_ty), m, sums)
    sums = sums * tl.load(S + t, mask=t < T, other=0.0)[:, None]
    out = OUT + t[:, None] * (tl.num_programs(1) * J) + block * J + j[None, :]
    tl.store(out, sums.to(OUT.dtype.element_ty), mask=(t[:, None] < T) & (j[None, :] < J))


@jit
def _scale_columns(B, INV, OUT, COUNT, scaling, rank, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(B + i, mask=i < COUNT, other=0.0).to(tl.float32) * scaling
    inverse = tl.load(INV + i // rank, mask=i < COUNT, other=0.0)
    tl.store(OUT + i, b.to(OUT.dtype.element_ty), mask=i < COUNT)
    tl.store(OUT + COUNT + i, (b * inverse).to(OUT.dtype.element_ty), mask=i < COUNT)


@jit
def _add_product(
    Y, RES, Z, M, T, N, E0, E1, E2, zt, mn, mj,
    RESIDUAL: tl.constexpr, J: tl.constexpr, JP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block, start, end = _block_of(tl.program_id(0), E0, E1, E2, BN)
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
    block, start, end = _block_of(tl.program_id(0), E0, E1, E2, BC)
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
        z = (z.to(tl.float32) * s[:, None]).to(Z.dtype.element_ty)
        sums = tl.dot(tl.trans(z), x.to(Z.dtype.element_ty), sums)
    sums = sums * alpha
    if SCALE:
        sums = sums * tl.load(OSCALE + c, mask=c < end, other=0.0)[None, :]
    tl.store(
        OUT + split.to(tl.int64) * C * J + c[None, :] * oc + j[:, None] * oj,
        sums,
        mask=(c[None, :] < end) & (j[:, None] < J),
    )


@jit
def _block_of(tile, E0, E1, E2, BN: tl.constexpr):
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

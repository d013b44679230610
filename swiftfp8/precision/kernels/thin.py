"""LoRA's A and B for the FP8 tensor cores: every value as the sum of two e4m3 terms.

x Aᵀ and dy B multiply an FP8 operand as wide as a layer by a thin one. To widen the wide one to
BF16 costs more time than to read it, so the thin one is brought to FP8 instead:

    v = m / s      s = amax / 448 of each 512 values of a row
    hi = e4m3(v)   lo = e4m3(16 (v - hi))
    x Mᵀ = Σ_tiles s (x8 hiᵀ + x8 loᵀ / 16)

Two roundings to four significant bits each leave an error of 2^-8, that of BF16. A group of linears
that read one x is merged: A [R, K] stacks their A's, R the sum of their ranks r; B [N, r] stacks
their B's, and `ends` are the blocks' ends in N: block i covers rows ends[i-1]..ends[i] of B and
columns i r..(i+1) r of dy B. The channel scales s_w of the weight are folded into dy before it is
quantized (see quantize.py), so they are divided out of B here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swiftfp8.precision.kernels._triton import (
    ceil_div,
    jit,
    next_power_of_2,
    runs_triton,
    shared_memory,
    tl,
)
from swiftfp8.precision.kernels.lora import block_of, three_ends
from swiftfp8.precision.kernels.quantize import (
    E4M3,
    E4M3_MAX,
    TINY,
    dequantize_rows,
    to_e4m3,
)

TILE = 512
_RANKS_PER_PROGRAM = 32


@dataclass(frozen=True, kw_only=True)
class Thin8:
    """M [J, C] as e4m3 [2J, C], rows 2j (hi) and 2j + 1 (lo), and float32 scales [tiles, 2J].

    Tiles of 512 columns begin anew with every block; `ends` are the blocks' ends in C.
    """

    data_JC: torch.Tensor
    scale_TJ: torch.Tensor
    ends: tuple[int, ...]

    def dequantize(self) -> torch.Tensor:
        """M [J, C] in float32."""
        scale = self.scale_TJ.repeat_interleave(TILE, 0)
        parts, row, start = [], 0, 0
        for end in self.ends:
            parts.append(scale[row : row + end - start])
            row, start = row + ceil_div(end - start, TILE) * TILE, end
        terms = self.data_JC.float() * torch.cat(parts).t()
        return terms[0::2] + terms[1::2]


@dataclass(frozen=True, kw_only=True)
class PackedAdapter:
    """A group's LoRA of one moment: A [R, K] and scaling * B [N, r] in the compute dtype, and both
    as Thin8, B with the weight's channel scales divided out."""

    a_RK: torch.Tensor
    b_Nr: torch.Tensor
    a8: Thin8
    b8: Thin8
    scaling: float


def pack_adapter(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    scaling: float,
    inverse_scale_N: torch.Tensor,
    dtype: torch.dtype,
) -> PackedAdapter:
    """Pack A's [r, K] and B's [N_i, r], of one shape each but for N_i, with 1 / s_w [N]."""
    (rank, features), blocks = a[0].shape, len(a)
    ends, outputs = [], 0
    for part in b:
        outputs += part.shape[0]
        ends.append(outputs)
    device, ranks = inverse_scale_N.device, blocks * rank
    a_RK = torch.empty(ranks, features, dtype=dtype, device=device)
    b_Nr = torch.empty(outputs, rank, dtype=dtype, device=device)
    if not runs_triton(inverse_scale_N):
        a_RK.copy_(torch.cat(list(a)))
        scaled = torch.cat(list(b)).float() * scaling
        b_Nr.copy_(scaled)
        folded = (scaled * inverse_scale_N[:, None]).t()
        a8 = split_reference(torch.cat(list(a)).float(), (features,))
        b8 = split_reference(folded, tuple(ends))
        return PackedAdapter(a_RK=a_RK, b_Nr=b_Nr, a8=a8, b8=b8, scaling=scaling)
    assert all(part.is_contiguous() for part in (*a, *b))
    a8 = _empty(ranks, features, (features,), device)
    b8 = _empty(rank, outputs, tuple(ends), device)
    a_tiles, b_tiles = a8.scale_TJ.shape[0], b8.scale_TJ.shape[0]
    last = blocks - 1
    _pack[(a_tiles + b_tiles,)](
        *[a[min(i, last)] for i in range(3)],
        *[b[min(i, last)] for i in range(3)],
        inverse_scale_N,
        a_RK,
        b_Nr,
        a8.data_JC,
        a8.scale_TJ,
        b8.data_JC,
        b8.scale_TJ,
        features,
        outputs,
        *three_ends(ends),
        scaling,
        a_tiles,
        BLOCKS=blocks,
        J=rank,
        JP=max(2, next_power_of_2(rank)),
        BC=TILE,
        num_warps=4,
    )
    return PackedAdapter(a_RK=a_RK, b_Nr=b_Nr, a8=a8, b8=b8, scaling=scaling)


def split_reference(m_JC: torch.Tensor, ends: tuple[int, ...]) -> Thin8:
    """A float32 M as Thin8, in plain PyTorch."""
    tiles, start = [], 0
    for end in ends:
        tiles += [(c, min(c + TILE, end)) for c in range(start, end, TILE)]
        start = end
    thin = _empty(*m_JC.shape, ends, m_JC.device)
    for tile, (start, end) in enumerate(tiles):
        part = m_JC[:, start:end]
        scale = part.abs().amax(1, keepdim=True).clamp(min=TINY) / E4M3_MAX
        hi = (part / scale).clamp(-E4M3_MAX, E4M3_MAX)
        lo = 16 * (hi - hi.to(E4M3).float())
        for row, term in enumerate((hi, lo)):
            thin.data_JC[row::2, start:end] = term.to(E4M3)
        thin.scale_TJ[tile, 0::2] = scale[:, 0]
        thin.scale_TJ[tile, 1::2] = scale[:, 0] / 16
    return thin


def project_rows(
    x8_TC: torch.Tensor, scale_T1: torch.Tensor, m8: Thin8, dtype: torch.dtype
) -> torch.Tensor:
    """scale * (x8 M_iᵀ) block by block of M's columns, [T, blocks * J]."""
    tokens, columns = x8_TC.shape
    ends, rank = m8.ends, m8.data_JC.shape[0] // 2
    if not runs_triton(x8_TC):
        x, m = dequantize_rows(x8_TC, scale_T1), m8.dequantize().t()
        parts = zip((0, *ends[:-1]), ends, strict=True)
        return torch.cat([x[:, start:end] @ m[start:end] for start, end in parts], -1).to(dtype)
    out = torch.empty(tokens, len(ends) * rank, dtype=dtype, device=x8_TC.device)
    ranks = max(8, min(_RANKS_PER_PROGRAM, next_power_of_2(rank)))
    _project_rows[(ceil_div(tokens, 64), len(ends), ceil_div(rank, ranks))](
        x8_TC,
        scale_T1,
        m8.data_JC,
        m8.scale_TJ,
        out,
        tokens,
        columns,
        *three_ends(ends),
        J=rank,
        JP=ranks,
        BT=64,
        BC=TILE,
        num_warps=4,
        num_stages=_stages(x8_TC.device, (64 + 2 * ranks) * TILE) if x8_TC.is_cuda else 1,
    )
    return out


def _stages(device: torch.device, size: int) -> int:
    """How many loads of `size` bytes go on at once: three, or what shared memory holds."""
    return max(1, min(3, (shared_memory(device) - 8192) // size))


def _empty(rows: int, columns: int, ends: tuple[int, ...], device: torch.device) -> Thin8:
    starts = (0, *ends[:-1])
    tiles = sum(ceil_div(end - start, TILE) for start, end in zip(starts, ends, strict=True))
    return Thin8(
        data_JC=torch.empty(2 * rows, columns, dtype=E4M3, device=device),
        scale_TJ=torch.empty(tiles, 2 * rows, dtype=torch.float32, device=device),
        ends=ends,
    )


@jit
def _pack(
    A0, A1, A2, B0, B1, B2, INV, A, B, A8, SA, B8, SB, K, N, E0, E1, E2, scaling, a_tiles,
    BLOCKS: tl.constexpr, J: tl.constexpr, JP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A tile of A's columns, of all blocks, or a tile of B's rows a program."""
    pid = tl.program_id(0)
    j = tl.arange(0, JP)
    if pid < a_tiles:
        k = pid * BC + tl.arange(0, BC)
        mask = (j[:, None] < J) & (k[None, :] < K)
        for block in tl.static_range(BLOCKS):
            if block == 0:
                source = A0
            elif block == 1:
                source = A1
            else:
                source = A2
            a = tl.load(source + j[:, None] * K + k[None, :], mask=mask, other=0.0).to(tl.float32)
            row = block * J + j
            tl.store(A + row[:, None] * K + k[None, :], a.to(A.dtype.element_ty), mask=mask)
            scales = SA + pid * (2 * BLOCKS * J) + 2 * row
            _store_terms(a, A8 + 2 * row[:, None] * K + k[None, :], K, scales, mask, j < J)
    else:
        tile = pid - a_tiles
        block, start, end = block_of(tile, E0, E1, E2, BC)
        n = start + tl.arange(0, BC)
        mask = (j[:, None] < J) & (n[None, :] < end)
        if block == 0:
            b = tl.load(B0 + n[None, :] * J + j[:, None], mask=mask, other=0.0).to(tl.float32)
        elif block == 1:
            own = (n - E0)[None, :] * J + j[:, None]
            b = tl.load(B1 + own, mask=mask, other=0.0).to(tl.float32)
        else:
            own = (n - E1)[None, :] * J + j[:, None]
            b = tl.load(B2 + own, mask=mask, other=0.0).to(tl.float32)
        b = b * scaling
        tl.store(B + n[None, :] * J + j[:, None], b.to(B.dtype.element_ty), mask=mask)
        b = b * tl.load(INV + n, mask=n < end, other=0.0)[None, :]
        row = 2 * j
        _store_terms(
            b, B8 + row[:, None] * N + n[None, :], N, SB + tile * (2 * J) + row, mask, j < J
        )


@jit
def _store_terms(m, place, stride, scales, mask, row_mask):
    scale = tl.maximum(tl.max(tl.abs(m), 1), 1e-30) / 448.0
    hi = m * (1.0 / scale)[:, None]
    hi8 = to_e4m3(hi)
    tl.store(place, hi8, mask=mask)
    tl.store(place + stride, to_e4m3(16.0 * (hi - hi8.to(tl.float32))), mask=mask)
    tl.store(scales, scale, mask=row_mask)
    tl.store(scales + 1, scale / 16.0, mask=row_mask)


@jit
def _project_rows(
    X8, S, M8, SM, OUT, T, C, E0, E1, E2,
    J: tl.constexpr, JP: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    block = tl.program_id(1)
    start = tl.where(block == 0, 0, tl.where(block == 1, E0, E1))
    end = tl.where(block == 0, E0, tl.where(block == 1, E1, E2))
    second = tl.cdiv(E0, BC)
    tile = tl.where(block == 0, 0, tl.where(block == 1, second, second + tl.cdiv(E1 - E0, BC)))
    term = 2 * tl.program_id(2) * JP + tl.arange(0, 2 * JP)
    sums = tl.zeros((BT, 2 * JP), tl.float32)
    rows = X8 + t[:, None].to(tl.int64) * C
    for first in range(start, end, BC):
        c = first + tl.arange(0, BC)
        x = tl.load(rows + c[None, :], mask=(t[:, None] < T) & (c[None, :] < end), other=0.0)
        m = tl.load(
            M8 + term[:, None] * C + c[None, :],
            mask=(term[:, None] < 2 * J) & (c[None, :] < end),
            other=0.0,
        )
        scale = tl.load(SM + tile * (2 * J) + term, mask=term < 2 * J, other=0.0)
        sums += tl.dot(x, tl.trans(m)) * scale[None, :]
        tile += 1
    both = tl.sum(tl.reshape(sums, (BT, JP, 2)), 2)
    both = both * tl.load(S + t, mask=t < T, other=0.0)[:, None]
    j = tl.program_id(2) * JP + tl.arange(0, JP)
    out = OUT + t[:, None] * (tl.num_programs(1) * J) + block * J + j[None, :]
    tl.store(out, both.to(OUT.dtype.element_ty), mask=(t[:, None] < T) & (j[None, :] < J))

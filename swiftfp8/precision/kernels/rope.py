"""What stands between the q/k/v matmul and attention: LoRA, bias, rotary embedding, in one pass.

    (x1, x2) = halves of a head of q or k       y1 = x1 cos - x2 sin      y2 = x2 cos + x1 sin

Forward, in place on the merged [T, (H + 2 G) D] output (H query heads, G key/value heads):
x = base + bias + xa_i B_iᵀ, then the rotation for q and k. Backward, attention's dq, dk, dv are
rotated back, merged, multiplied by the weight's channel scales and quantized, one row at a time.
`cos` and `sin` are [P, D] with P = the sequence length or the number of tokens; token t uses row
t mod P. Both are None where the rotation is done elsewhere (a norm on q and k comes first).
"""

from dataclasses import dataclass

import torch

from swiftfp8.precision.kernels._triton import ceil_div, jit, next_power_of_2, runs_triton, tl
from swiftfp8.precision.kernels.lora import add_product_
from swiftfp8.precision.kernels.quantize import E4M3, quantize_rows_reference, to_e4m3


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Query heads, key/value heads, and their width."""

    query: int
    key_value: int
    width: int

    @property
    def ends(self) -> tuple[int, int, int]:
        """Where q, k and v end in the merged output."""
        q = self.query * self.width
        kv = self.key_value * self.width
        return (q, q + kv, q + 2 * kv)


def finish_qkv_(
    qkv_TN: torch.Tensor,
    lora: tuple[torch.Tensor, torch.Tensor] | None,
    bias_N: torch.Tensor | None,
    cos_PD: torch.Tensor | None,
    sin_PD: torch.Tensor | None,
    heads: Heads,
) -> torch.Tensor:
    """Add bias and LoRA's product (xa [T, 3r], B [N, r]), rotate q and k: all in place."""
    if lora is None and bias_N is None and cos_PD is None:
        return qkv_TN
    if not runs_triton(qkv_TN):
        return _finish_reference(qkv_TN, lora, bias_N, cos_PD, sin_PD, heads)
    xa, b = (qkv_TN, qkv_TN) if lora is None else lora
    half = heads.width // 2
    rank = 16 if lora is None else b.shape[1]
    _finish_qkv[(heads.query + 2 * heads.key_value, ceil_div(qkv_TN.shape[0], 64))](
        qkv_TN,
        xa,
        b,
        qkv_TN if bias_N is None else bias_N,
        qkv_TN if cos_PD is None else cos_PD,
        qkv_TN if sin_PD is None else sin_PD,
        qkv_TN.shape[0],
        qkv_TN.shape[1],
        1 if cos_PD is None else cos_PD.shape[0],
        heads.query,
        heads.key_value,
        LORA=lora is not None,
        BIAS=bias_N is not None,
        ROPE=cos_PD is not None,
        J=rank,
        JP=max(16, next_power_of_2(rank)),
        D=heads.width,
        HALF=max(16, next_power_of_2(half)),
        BT=64,
        num_warps=4,
    )
    return qkv_TN


def quantize_qkv_gradient(
    dq_BHSD: torch.Tensor,
    dk_BGSD: torch.Tensor,
    dv_BGSD: torch.Tensor,
    cos_PD: torch.Tensor | None,
    sin_PD: torch.Tensor | None,
    col_scale_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows [T, N] of the merged, rotated-back gradient * col_scale, and scales [T, 1]."""
    if not runs_triton(dq_BHSD):
        merged = _merge_reference(dq_BHSD, dk_BGSD, dv_BGSD, cos_PD, sin_PD)
        return quantize_rows_reference(merged, col_scale_N)
    batch, queries, length, width = dq_BHSD.shape
    key_values = dk_BGSD.shape[1]
    parts = [x if x.stride(3) == 1 else x.contiguous() for x in (dq_BHSD, dk_BGSD, dv_BGSD)]
    tokens, columns = batch * length, (queries + 2 * key_values) * width
    g8 = torch.empty(tokens, columns, dtype=E4M3, device=dq_BHSD.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=dq_BHSD.device)
    strides = [part.stride(axis) for part in parts for axis in (0, 1, 2)]
    _quantize_qkv_gradient[(tokens,)](
        *parts,
        scale if cos_PD is None else cos_PD,
        scale if sin_PD is None else sin_PD,
        col_scale_N,
        g8,
        scale,
        length,
        1 if cos_PD is None else cos_PD.shape[0],
        *strides,
        ROPE=cos_PD is not None,
        H=queries,
        HP=next_power_of_2(queries),
        G=key_values,
        GP=next_power_of_2(key_values),
        D=width,
        HALF=next_power_of_2(width // 2),
        num_warps=4,
    )
    return g8, scale


def rotate_reference(
    x_BHSD: torch.Tensor, cos_PD: torch.Tensor, sin_PD: torch.Tensor, *, back: bool = False
) -> torch.Tensor:
    """The rotation (or its inverse) of [B, H, S, D] in plain, differentiable PyTorch."""
    batch, _, length, width = x_BHSD.shape
    shape = (batch if cos_PD.shape[0] == batch * length else 1, 1, length, width)
    cos, sin = cos_PD.view(shape), sin_PD.view(shape)
    first, second = x_BHSD.chunk(2, -1)
    turned = torch.cat([second, -first] if back else [-second, first], -1)
    return x_BHSD * cos + turned * sin


def _finish_reference(
    qkv_TN: torch.Tensor,
    lora: tuple[torch.Tensor, torch.Tensor] | None,
    bias_N: torch.Tensor | None,
    cos_PD: torch.Tensor | None,
    sin_PD: torch.Tensor | None,
    heads: Heads,
) -> torch.Tensor:
    x = qkv_TN.float()
    if lora is not None:
        x = add_product_(x, *lora, heads.ends)
    if bias_N is not None:
        x = x + bias_N.float()
    if cos_PD is not None and sin_PD is not None:
        turned = heads.ends[1]
        length = cos_PD.shape[0]
        by_head = x[:, :turned].view(-1, length, turned // heads.width, heads.width)
        by_head = rotate_reference(by_head.transpose(1, 2), cos_PD.float(), sin_PD.float())
        x = torch.cat([by_head.transpose(1, 2).reshape(-1, turned), x[:, turned:]], -1)
    return qkv_TN.copy_(x)


def _merge_reference(
    dq_BHSD: torch.Tensor,
    dk_BGSD: torch.Tensor,
    dv_BGSD: torch.Tensor,
    cos_PD: torch.Tensor | None,
    sin_PD: torch.Tensor | None,
) -> torch.Tensor:
    parts = [dq_BHSD.float(), dk_BGSD.float(), dv_BGSD.float()]
    if cos_PD is not None and sin_PD is not None:
        cos, sin = cos_PD.float(), sin_PD.float()
        parts[:2] = [rotate_reference(part, cos, sin, back=True) for part in parts[:2]]
    tokens = dq_BHSD.shape[0] * dq_BHSD.shape[2]
    return torch.cat([part.transpose(1, 2).reshape(tokens, -1) for part in parts], -1)


@jit
def _finish_qkv(
    QKV, XA, B, BIAS_N, COS, SIN, T, N, P, H, G,
    LORA: tl.constexpr, BIAS: tl.constexpr, ROPE: tl.constexpr, J: tl.constexpr,
    JP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    d = tl.arange(0, HALF)
    n = head * D + d
    in_half = d < D // 2
    mask = (t[:, None] < T) & in_half[None, :]
    place = QKV + t[:, None].to(tl.int64) * N + n[None, :]
    x1 = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(place + D // 2, mask=mask, other=0.0).to(tl.float32)
    if LORA:
        j = tl.arange(0, JP)
        block = (head >= H).to(tl.int32) + (head >= H + G).to(tl.int32)
        z = tl.load(
            XA + t[:, None] * (3 * J) + block * J + j[None, :],
            mask=(t[:, None] < T) & (j[None, :] < J),
            other=0.0,
        )
        b_place = B + n[None, :] * J + j[:, None]
        b_mask = in_half[None, :] & (j[:, None] < J)
        x1 += tl.dot(z, tl.load(b_place, mask=b_mask, other=0.0))
        x2 += tl.dot(z, tl.load(b_place + (D // 2) * J, mask=b_mask, other=0.0))
    if BIAS:
        x1 += tl.load(BIAS_N + n, mask=in_half, other=0.0).to(tl.float32)[None, :]
        x2 += tl.load(BIAS_N + n + D // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    if ROPE and head < H + G:
        turn = (t % P)[:, None] * D + d[None, :]
        c1 = tl.load(COS + turn, mask=mask, other=0.0).to(tl.float32)
        s1 = tl.load(SIN + turn, mask=mask, other=0.0).to(tl.float32)
        y1 = x1 * c1 - x2 * s1
        x2 = x2 * c1 + x1 * s1
        x1 = y1
    tl.store(place, x1.to(QKV.dtype.element_ty), mask=mask)
    tl.store(place + D // 2, x2.to(QKV.dtype.element_ty), mask=mask)


@jit
def _quantize_qkv_gradient(
    DQ, DK, DV, COS, SIN, COL, G8, S, LENGTH, P,
    qb, qh, qs, kb, kh, ks, vb, vh, vs,
    ROPE: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    b = t // LENGTH
    s = t % LENGTH
    d = tl.arange(0, HALF)
    cos = tl.full((HALF,), 1.0, tl.float32)
    sin = tl.zeros((HALF,), tl.float32)
    if ROPE:
        cos = tl.load(COS + (t % P) * D + d, mask=d < D // 2, other=0.0).to(tl.float32)
        sin = tl.load(SIN + (t % P) * D + d, mask=d < D // 2, other=0.0).to(tl.float32)
    zero = tl.zeros((HALF,), tl.float32)
    q_col = tl.arange(0, HP)[:, None] * D + d[None, :]
    q_mask = (tl.arange(0, HP)[:, None] < H) & (d[None, :] < D // 2)
    q_place = DQ + b * qb + s * qs + tl.arange(0, HP)[:, None] * qh + d[None, :]
    q1, q2 = _turn_back(q_place, COL + q_col, q_mask, cos, sin, D)
    k_head = tl.arange(0, GP)[:, None]
    k_mask = (k_head < G) & (d[None, :] < D // 2)
    k_col = (H + k_head) * D + d[None, :]
    k1, k2 = _turn_back(
        DK + b * kb + s * ks + k_head * kh + d[None, :], COL + k_col, k_mask, cos, sin, D
    )
    v_col = (H + G + k_head) * D + d[None, :]
    v1, v2 = _turn_back(
        DV + b * vb + s * vs + k_head * vh + d[None, :], COL + v_col, k_mask, zero + 1.0, zero, D
    )
    peak = tl.maximum(_peak(q1, q2), tl.maximum(_peak(k1, k2), _peak(v1, v2)))
    scale = tl.maximum(peak, 1e-30) / 448.0
    inverse = 1.0 / scale
    tl.store(S + t, scale)
    row = G8 + t * ((H + 2 * G) * D)
    tl.store(row + q_col, to_e4m3(q1 * inverse), mask=q_mask)
    tl.store(row + q_col + D // 2, to_e4m3(q2 * inverse), mask=q_mask)
    tl.store(row + k_col, to_e4m3(k1 * inverse), mask=k_mask)
    tl.store(row + k_col + D // 2, to_e4m3(k2 * inverse), mask=k_mask)
    tl.store(row + v_col, to_e4m3(v1 * inverse), mask=k_mask)
    tl.store(row + v_col + D // 2, to_e4m3(v2 * inverse), mask=k_mask)


@jit
def _turn_back(place, col, mask, cos, sin, D: tl.constexpr):
    g1 = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    g2 = tl.load(place + D // 2, mask=mask, other=0.0).to(tl.float32)
    x1 = (g1 * cos[None, :] + g2 * sin[None, :]) * tl.load(col, mask=mask, other=0.0)
    x2 = (g2 * cos[None, :] - g1 * sin[None, :]) * tl.load(col + D // 2, mask=mask, other=0.0)
    return x1, x2


@jit
def _peak(a, b):
    return tl.max(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1), 0)

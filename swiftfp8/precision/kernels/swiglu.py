"""SwiGLU between two FP8 matmuls: neither its product nor its gradients are written in BF16.

    g, u = base + LoRA        m = silu(g) u
    forward:  m8, sm = rows of m;  g and u are kept as FP8 rows, each with its own scale
    dm = base + LoRA          dg = dm u sig(g) (1 + g - g sig(g))       du = dm silu(g)
    backward: d8, sd = rows of [dg | du] * s_w   (s_w the channel scales of gate and up), and m8
    again, which dA of down_proj reads, so that it need not be kept through the step

A row's scale needs the whole row. Forward, LoRA's product wants many rows at once, so two passes go
over tiles: the first finds the rows' largest values, the second writes FP8 under the scales that
follow; both add LoRA's product on load (rank r, a sliver of tensor core work), which saves writing
it. Without LoRA, and backward, a program has one row. In bytes per element of m: forward 4, then
4 + 3; backward 4 + 3. These kernels are bound by
instructions as much as by memory, hence the approximate sigmoid (two of the GPU's special
functions, 2 ulp each).

The backward pass uses g and u as rounded to FP8: their 2.6% error enters dg, du and dA of down as a
relative error of that size, like every other FP8 operand of the step.
"""

from dataclasses import dataclass
from typing import Any

import torch

from swiftfp8.precision.kernels._triton import (
    INTERPRETED,
    ceil_div,
    jit,
    next_power_of_2,
    operator,
    runs_triton,
    tl,
    traced,
)
from swiftfp8.precision.kernels.lora import add_product_
from swiftfp8.precision.kernels.quantize import (
    E4M3,
    dequantize_rows,
    quantize_rows_reference,
    to_e4m3,
)

_TILE = {"BT": 16, "BN": 256, "num_warps": 4}
_PEAK_TILE = {"BT": 64, "BN": 64, "num_warps": 4}
_TILES_PER_PROGRAM = 8
_HELD_CHUNKS = 5
# Triton's interpreter has no inline assembly.
_EXACT_SIGMOID = tl.constexpr(INTERPRETED) if tl.constexpr is not object else INTERPRETED
Lora = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class GateUp:
    """Gate and up side by side, [T, 2I]: BF16 with no scales, or FP8 with scales [T, 2]."""

    data_TI2: torch.Tensor
    scale_T2: torch.Tensor | None

    def dequantize(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up in float32."""
        gate, up = self.data_TI2.chunk(2, -1)
        if self.scale_T2 is None:
            return gate.float(), up.float()
        scale = self.scale_T2
        return dequantize_rows(gate, scale[:, 0]), dequantize_rows(up, scale[:, 1])


def swiglu_quantize(
    gate_up_TI2: torch.Tensor, lora: Lora | None, *, keep: bool, keep_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, GateUp | None]:
    """m8, sm [T, 1], and where `keep`, what the backward pass needs of gate and up.

    `lora` is (xa [T, 2r], B [2I, r]), whose product belongs to gate and up. Where BF16 is kept,
    it is added in place.
    """
    if not runs_triton(gate_up_TI2):
        return _forward_reference(gate_up_TI2, lora, keep, keep_fp8)
    tokens, width = gate_up_TI2.shape
    inner, device = width // 2, gate_up_TI2.device
    peaks = torch.zeros(tokens, 3, dtype=torch.int32, device=device)
    m8 = torch.empty(tokens, inner, dtype=E4M3, device=device)
    scales = torch.empty(3, tokens, dtype=torch.float32, device=device)
    to_fp8 = keep and keep_fp8
    kept = torch.empty_like(gate_up_TI2, dtype=E4M3) if to_fp8 else gate_up_TI2
    xa, b = (gate_up_TI2, gate_up_TI2) if lora is None else lora
    shape, columns = _lora_shape(lora), _PEAK_TILE["BN"] * _TILES_PER_PROGRAM
    _swiglu_peaks[(ceil_div(inner, columns), ceil_div(tokens, _PEAK_TILE["BT"]))](
        gate_up_TI2, xa, b, peaks, tokens, inner,
        KEEP=to_fp8, TILES=_TILES_PER_PROGRAM, **shape, **_PEAK_TILE,
    )  # fmt: skip
    _swiglu_write[(ceil_div(inner, _TILE["BN"]), ceil_div(tokens, _TILE["BT"]))](
        gate_up_TI2, xa, b, peaks, m8, kept, scales, tokens, inner,
        KEEP=to_fp8, ADD=keep and not to_fp8 and lora is not None, **shape, **_TILE,
    )  # fmt: skip
    sm = scales[0].view(tokens, 1)
    if not keep:
        return m8, sm, None
    return m8, sm, GateUp(data_TI2=kept, scale_T2=scales[1:].t() if to_fp8 else None)


def swiglu_backward(
    dm_TI: torch.Tensor, kept: GateUp, sm_T1: torch.Tensor, col_scale_I2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d8 [T, 2I] of [dg | du] * col_scale, its scales [T, 1], and m8 under the scales sm.

    `col_scale` may be in BF16, where that is exact, which takes a tenth less time.
    """
    return _launch_backward(dm_TI, kept, sm_T1, col_scale_I2, _swiglu_backward)


@operator("swiglu_rows")
def swiglu_rows_op(gate_up_TI2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """m8 [T, I] and sm [T, 1] where no LoRA is added, one row a program."""
    if not runs_triton(gate_up_TI2):
        return _forward_reference(gate_up_TI2, None, keep=False, keep_fp8=False)[:2]
    tokens, width = gate_up_TI2.shape
    inner = width // 2
    m8 = torch.empty(tokens, inner, dtype=E4M3, device=gate_up_TI2.device)
    sm = torch.empty(tokens, 1, dtype=torch.float32, device=gate_up_TI2.device)
    block, chunks = _row_blocks(inner)
    traced(_swiglu_rows)[(tokens,)](
        gate_up_TI2, m8, sm, inner,
        HOLD=chunks <= _HELD_CHUNKS, BLOCK=block, CHUNKS=chunks, num_warps=max(1, block // 256),
    )  # fmt: skip
    return m8, sm


@operator("swiglu_rows_backward")
def swiglu_rows_backward_op(
    dm_TI: torch.Tensor, gate_up_TI2: torch.Tensor, sm_T1: torch.Tensor, col_scale_I2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`swiglu_backward` of gate and up in BF16, for code that is compiled."""
    kept = GateUp(data_TI2=gate_up_TI2, scale_T2=None)
    return _launch_backward(dm_TI, kept, sm_T1, col_scale_I2, traced(_swiglu_backward))


def _launch_backward(
    dm_TI: torch.Tensor,
    kept: GateUp,
    sm_T1: torch.Tensor,
    col_scale_I2: torch.Tensor,
    kernel: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not runs_triton(dm_TI):
        return _backward_reference(dm_TI, kept, sm_T1, col_scale_I2)
    tokens, inner = dm_TI.shape
    d8 = torch.empty(tokens, 2 * inner, dtype=E4M3, device=dm_TI.device)
    sd = torch.empty(tokens, 1, dtype=torch.float32, device=dm_TI.device)
    m8 = torch.empty(tokens, inner, dtype=E4M3, device=dm_TI.device)
    scale = sm_T1 if kept.scale_T2 is None else kept.scale_T2.t().contiguous()
    block, chunks = _row_blocks(inner)
    kernel[(tokens,)](
        dm_TI, kept.data_TI2, scale, sm_T1, col_scale_I2, d8, sd, m8, tokens, inner,
        FP8=kept.scale_T2 is not None, BLOCK=block, CHUNKS=chunks,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return d8, sd, m8


def _row_blocks(inner: int) -> tuple[int, int]:
    """Elements of a row at a time, and how often."""
    block = min(4096, max(256, next_power_of_2(ceil_div(inner, _HELD_CHUNKS))))
    return block, ceil_div(inner, block)


def _lora_shape(lora: Lora | None) -> dict[str, int | bool]:
    rank = 16 if lora is None else lora[1].shape[1]
    return {"LORA": lora is not None, "J": rank, "JP": max(16, next_power_of_2(rank))}


def _forward_reference(
    gate_up_TI2: torch.Tensor, lora: Lora | None, keep: bool, keep_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, GateUp | None]:
    inner = gate_up_TI2.shape[1] // 2
    gate_up = gate_up_TI2.float()
    if lora is not None:
        gate_up = add_product_(gate_up.clone(), *lora, (inner, 2 * inner))
    gate, up = gate_up.chunk(2, -1)
    m8, sm = quantize_rows_reference(torch.nn.functional.silu(gate) * up)
    if not keep:
        return m8, sm, None
    if not keep_fp8:
        return m8, sm, GateUp(data_TI2=gate_up_TI2.copy_(gate_up), scale_T2=None)
    (g8, sg), (u8, su) = quantize_rows_reference(gate), quantize_rows_reference(up)
    data = torch.cat([g8.view(torch.uint8), u8.view(torch.uint8)], -1).view(E4M3)
    return m8, sm, GateUp(data_TI2=data, scale_T2=torch.cat([sg, su], -1))


def _backward_reference(
    dm_TI: torch.Tensor, kept: GateUp, sm_T1: torch.Tensor, col_scale_I2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gate, up = kept.dequantize()
    dm, sigma = dm_TI.float(), torch.sigmoid(gate)
    d_gate = dm * up * sigma * (1 + gate * (1 - sigma))
    d_up = dm * gate * sigma
    d8, sd = quantize_rows_reference(torch.cat([d_gate, d_up], -1), col_scale_I2)
    m8 = (gate * sigma * up / sm_T1).clamp(-448.0, 448.0).to(E4M3)
    return d8, sd, m8


@jit
def _swiglu_peaks(
    GU, XA, B, PEAKS, T, INNER,
    KEEP: tl.constexpr, TILES: tl.constexpr, LORA: tl.constexpr, J: tl.constexpr,
    JP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    first = tl.program_id(0) * (BN * TILES)
    m_peak = tl.zeros((BT,), tl.float32)
    g_peak = tl.zeros((BT,), tl.float32)
    u_peak = tl.zeros((BT,), tl.float32)
    for tile in range(TILES):
        i = first + tile * BN + tl.arange(0, BN)
        g, u = _gate_and_up(GU, XA, B, t, i, T, INNER, LORA, J, JP)
        m_peak = tl.maximum(m_peak, tl.max(tl.abs(g * _sigmoid(g) * u), 1))
        if KEEP:
            g_peak = tl.maximum(g_peak, tl.max(tl.abs(g), 1))
            u_peak = tl.maximum(u_peak, tl.max(tl.abs(u), 1))
    # The bits of positive floats are in the order of their values.
    tl.atomic_max(PEAKS + t * 3, m_peak.to(tl.int32, bitcast=True), mask=t < T, sem="relaxed")
    if KEEP:
        tl.atomic_max(
            PEAKS + t * 3 + 1, g_peak.to(tl.int32, bitcast=True), mask=t < T, sem="relaxed"
        )
        tl.atomic_max(
            PEAKS + t * 3 + 2, u_peak.to(tl.int32, bitcast=True), mask=t < T, sem="relaxed"
        )


@jit
def _swiglu_write(
    GU, XA, B, PEAKS, M8, KEPT, SCALES, T, INNER,
    KEEP: tl.constexpr, ADD: tl.constexpr, LORA: tl.constexpr, J: tl.constexpr,
    JP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    mask = (t[:, None] < T) & (i[None, :] < INNER)
    g, u = _gate_and_up(GU, XA, B, t, i, T, INNER, LORA, J, JP)
    first = tl.program_id(0) == 0
    sm = _scale_of(PEAKS + t * 3, t < T)
    tl.store(SCALES + t, sm, mask=(t < T) & first)
    m = g * _sigmoid(g) * u
    rows = t[:, None].to(tl.int64)
    tl.store(M8 + rows * INNER + i[None, :], to_e4m3(m * (1.0 / sm)[:, None]), mask=mask)
    kept = KEPT + rows * (2 * INNER) + i[None, :]
    if KEEP:
        sg = _scale_of(PEAKS + t * 3 + 1, t < T)
        su = _scale_of(PEAKS + t * 3 + 2, t < T)
        tl.store(SCALES + T + t, sg, mask=(t < T) & first)
        tl.store(SCALES + 2 * T + t, su, mask=(t < T) & first)
        tl.store(kept, to_e4m3(g * (1.0 / sg)[:, None]), mask=mask)
        tl.store(kept + INNER, to_e4m3(u * (1.0 / su)[:, None]), mask=mask)
    if ADD:
        tl.store(kept, g.to(KEPT.dtype.element_ty), mask=mask)
        tl.store(kept + INNER, u.to(KEPT.dtype.element_ty), mask=mask)


@jit
def _swiglu_rows(
    GU, M8, SM, INNER, HOLD: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """One row a program, held in registers (HOLD), or computed again for the cast."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    gate_up = GU + row * 2 * INNER
    peak = tl.zeros((BLOCK,), tl.float32)
    held = ()
    for chunk in tl.static_range(CHUNKS):
        m = _product(gate_up, chunk * BLOCK + offsets, INNER)
        peak = tl.maximum(peak, tl.abs(m))
        if HOLD:
            held = held + (m,)  # noqa: RUF005 (Triton has no *)
    sm = tl.maximum(tl.max(peak, 0), 1e-30) / 448.0
    tl.store(SM + row, sm)
    inverse = 1.0 / sm
    for chunk in tl.static_range(CHUNKS):
        i = chunk * BLOCK + offsets
        m = held[chunk] if HOLD else _product(gate_up, i, INNER)
        tl.store(M8 + row * INNER + i, to_e4m3(m * inverse), mask=i < INNER)


@jit
def _product(GU, i, INNER):
    """Elements i of a row's silu(gate) up."""
    g = tl.load(GU + i, mask=i < INNER, other=0.0).to(tl.float32)
    u = tl.load(GU + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    return g * _sigmoid(g) * u


@jit
def _swiglu_backward(
    DM, KEPT, KSCALE, SM, COL, D8, SD, M8, T, INNER,
    FP8: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One row a program, read a second time, from cache, for the cast.

    Held in registers meanwhile it would take so many that too few programs run at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    sg = 1.0
    su = 1.0
    if FP8:
        sg = tl.load(KSCALE + row)
        su = tl.load(KSCALE + T + row)
    m_inv = 1.0 / tl.load(SM + row)
    dm_row = DM + row * INNER
    kept_row = KEPT + row * 2 * INNER
    peak = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        i = chunk * BLOCK + offsets
        dg, du, m = _gradients(dm_row, kept_row, COL, i, INNER, sg, su)
        peak = tl.maximum(peak, tl.maximum(tl.abs(dg), tl.abs(du)))
        # m, made from rounded g and u, may exceed the scale made from exact ones: clamp it.
        m = tl.minimum(tl.maximum(m * m_inv, -448.0), 448.0)
        tl.store(M8 + row * INNER + i, to_e4m3(m), mask=i < INNER)
    sd = tl.maximum(tl.max(peak, 0), 1e-30) / 448.0
    tl.store(SD + row, sd)
    d_inv = 1.0 / sd
    d_row = D8 + row * 2 * INNER
    for chunk in tl.static_range(CHUNKS):
        i = chunk * BLOCK + offsets
        dg, du, _ = _gradients(dm_row, kept_row, COL, i, INNER, sg, su)
        tl.store(d_row + i, to_e4m3(dg * d_inv), mask=i < INNER)
        tl.store(d_row + INNER + i, to_e4m3(du * d_inv), mask=i < INNER)


@jit
def _gate_and_up(GU, XA, B, t, i, T, INNER, LORA: tl.constexpr, J: tl.constexpr, JP: tl.constexpr):
    """A tile of gate and of up in float32, LoRA's product added."""
    mask = (t[:, None] < T) & (i[None, :] < INNER)
    place = GU + t[:, None].to(tl.int64) * (2 * INNER) + i[None, :]
    g = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(place + INNER, mask=mask, other=0.0).to(tl.float32)
    if LORA:
        j = tl.arange(0, JP)
        xa_mask = (t[:, None] < T) & (j[None, :] < J)
        xa = XA + t[:, None] * (2 * J) + j[None, :]
        b_mask = (i[None, :] < INNER) & (j[:, None] < J)
        b = B + i[None, :] * J + j[:, None]
        xa_gate = tl.load(xa, mask=xa_mask, other=0.0)
        xa_up = tl.load(xa + J, mask=xa_mask, other=0.0)
        g = tl.dot(xa_gate, tl.load(b, mask=b_mask, other=0.0), g)
        u = tl.dot(xa_up, tl.load(b + INNER * J, mask=b_mask, other=0.0), u)
    return g, u


@jit
def _gradients(DM, KEPT, COL, i, INNER, sg, su):
    """dg * s_w, du * s_w and m of a row's elements i, in float32."""
    mask = i < INNER
    dm = tl.load(DM + i, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(KEPT + i, mask=mask, other=0.0).to(tl.float32) * sg
    u = tl.load(KEPT + INNER + i, mask=mask, other=0.0).to(tl.float32) * su
    sigma = _sigmoid(g)
    silu = g * sigma
    dg = dm * u * (sigma * (1.0 + g - silu)) * tl.load(COL + i, mask=mask, other=0.0).to(tl.float32)
    du = dm * silu * tl.load(COL + INNER + i, mask=mask, other=0.0).to(tl.float32)
    return dg, du, silu * u


@jit
def _sigmoid(x):
    if _EXACT_SIGMOID:
        return tl.sigmoid(x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 e;
        mul.ftz.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.ftz.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def _scale_of(peak_bits, mask):
    peak = tl.load(peak_bits, mask=mask, other=0).to(tl.float32, bitcast=True)
    return tl.maximum(peak, 1e-30) / 448.0

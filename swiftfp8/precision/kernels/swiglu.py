"""SwiGLU between two FP8 matmuls: neither its product nor its gradients are written in BF16.

    m = silu(g) u           forward:  m8, sm = rows of m;  g and u are kept as FP8 rows
    dg = dm u σ(g)(1 + g(1 - σ(g)))       du = dm silu(g)
    backward: d8, sd = rows of [dg | du] * s_w   (s_w the channel scales of gate and up), and m8
    again, which dA of down_proj reads, so that it need not be kept through the step

A row is read once for its scales and a second time, from cache, for the cast. Traffic per element
of m, in bytes: forward 4 + 1 + 2 (g and u kept in FP8), backward 2 + 2 + 2 + 1.
The backward pass uses g and u as rounded to FP8: their 2.6% error enters dg, du and dA of down as a
relative error of that size, like every other FP8 operand of the step.
"""

from dataclasses import dataclass

import torch

from swiftfp8.precision.kernels._triton import ceil_div, jit, next_power_of_2, runs_triton, tl
from swiftfp8.precision.kernels.quantize import (
    E4M3,
    dequantize_rows,
    quantize_rows_reference,
    to_e4m3,
)


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
    gate_up_TI2: torch.Tensor, *, keep: bool, keep_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, GateUp | None]:
    """m8, sm [T, 1], and where `keep`, what the backward pass needs of gate and up."""
    if not runs_triton(gate_up_TI2):
        return _forward_reference(gate_up_TI2, keep, keep_fp8)
    tokens, width = gate_up_TI2.shape
    inner = width // 2
    device = gate_up_TI2.device
    m8 = torch.empty(tokens, inner, dtype=E4M3, device=device)
    sm = torch.empty(tokens, 1, dtype=torch.float32, device=device)
    kept, kept_scale = gate_up_TI2, None
    if keep and keep_fp8:
        kept = torch.empty(tokens, width, dtype=E4M3, device=device)
        kept_scale = torch.empty(tokens, 2, dtype=torch.float32, device=device)
    _swiglu[(tokens,)](
        gate_up_TI2,
        m8,
        sm,
        kept,
        sm if kept_scale is None else kept_scale,
        inner,
        KEEP=kept_scale is not None,
        **_row_shape(inner),
    )
    return m8, sm, GateUp(data_TI2=kept, scale_T2=kept_scale) if keep else None


def swiglu_backward(
    dm_TI: torch.Tensor, kept: GateUp, sm_T1: torch.Tensor, col_scale_I2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d8 [T, 2I] of [dg | du] * col_scale, its scales [T, 1], and m8 under the scales sm."""
    if not runs_triton(dm_TI):
        return _backward_reference(dm_TI, kept, sm_T1, col_scale_I2)
    tokens, inner = dm_TI.shape
    d8 = torch.empty(tokens, 2 * inner, dtype=E4M3, device=dm_TI.device)
    sd = torch.empty(tokens, 1, dtype=torch.float32, device=dm_TI.device)
    m8 = torch.empty(tokens, inner, dtype=E4M3, device=dm_TI.device)
    _swiglu_backward[(tokens,)](
        dm_TI,
        kept.data_TI2,
        sm_T1 if kept.scale_T2 is None else kept.scale_T2,
        sm_T1,
        col_scale_I2,
        d8,
        sd,
        m8,
        inner,
        FP8=kept.scale_T2 is not None,
        **_row_shape(inner),
    )
    return d8, sd, m8


def _row_shape(inner: int) -> dict[str, int]:
    block = min(next_power_of_2(inner), 4096)
    return {
        "BLOCK": block,
        "CHUNKS": ceil_div(inner, block),
        "num_warps": max(1, min(16, block // 256)),
    }


def _forward_reference(
    gate_up_TI2: torch.Tensor, keep: bool, keep_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, GateUp | None]:
    gate, up = gate_up_TI2.float().chunk(2, -1)
    m8, sm = quantize_rows_reference(torch.nn.functional.silu(gate) * up)
    if not keep:
        return m8, sm, None
    if not keep_fp8:
        return m8, sm, GateUp(data_TI2=gate_up_TI2, scale_T2=None)
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
def _swiglu(
    GU, M8, SM, KEPT, KSCALE, INNER,
    KEEP: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    gate_row = GU + row * 2 * INNER
    m_peak = tl.zeros((BLOCK,), tl.float32)
    g_peak = tl.zeros((BLOCK,), tl.float32)
    u_peak = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        i = chunk * BLOCK + offsets
        g = tl.load(gate_row + i, mask=i < INNER, other=0.0).to(tl.float32)
        u = tl.load(gate_row + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
        m_peak = tl.maximum(m_peak, tl.abs(g * tl.sigmoid(g) * u))
        if KEEP:
            g_peak = tl.maximum(g_peak, tl.abs(g))
            u_peak = tl.maximum(u_peak, tl.abs(u))
    sm = tl.maximum(tl.max(m_peak, 0), 1e-30) / 448.0
    tl.store(SM + row, sm)
    m_inv = 1.0 / sm
    sg = tl.maximum(tl.max(g_peak, 0), 1e-30) / 448.0
    su = tl.maximum(tl.max(u_peak, 0), 1e-30) / 448.0
    if KEEP:
        tl.store(KSCALE + row * 2, sg)
        tl.store(KSCALE + row * 2 + 1, su)
    for chunk in tl.static_range(CHUNKS):
        i = chunk * BLOCK + offsets
        g = tl.load(gate_row + i, mask=i < INNER, other=0.0).to(tl.float32)
        u = tl.load(gate_row + INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
        m = g * tl.sigmoid(g) * u
        tl.store(M8 + row * INNER + i, to_e4m3(m * m_inv), mask=i < INNER)
        if KEEP:
            kept_row = KEPT + row * 2 * INNER
            tl.store(kept_row + i, to_e4m3(g / sg), mask=i < INNER)
            tl.store(kept_row + INNER + i, to_e4m3(u / su), mask=i < INNER)


@jit
def _swiglu_backward(
    DM, KEPT, KSCALE, SM, COL, D8, SD, M8, INNER,
    FP8: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    kept_row = KEPT + row * 2 * INNER
    sg = 1.0
    su = 1.0
    if FP8:
        sg = tl.load(KSCALE + row * 2)
        su = tl.load(KSCALE + row * 2 + 1)
    m_inv = 1.0 / tl.load(SM + row)
    peak = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        i = chunk * BLOCK + offsets
        mask = i < INNER
        dm = tl.load(DM + row * INNER + i, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(kept_row + i, mask=mask, other=0.0).to(tl.float32) * sg
        u = tl.load(kept_row + INNER + i, mask=mask, other=0.0).to(tl.float32) * su
        dg, du, _ = _gradients(dm, g, u)
        dg *= tl.load(COL + i, mask=mask, other=0.0)
        du *= tl.load(COL + INNER + i, mask=mask, other=0.0)
        peak = tl.maximum(peak, tl.maximum(tl.abs(dg), tl.abs(du)))
    sd = tl.maximum(tl.max(peak, 0), 1e-30) / 448.0
    tl.store(SD + row, sd)
    d_inv = 1.0 / sd
    d_row = D8 + row * 2 * INNER
    for chunk in tl.static_range(CHUNKS):
        i = chunk * BLOCK + offsets
        mask = i < INNER
        dm = tl.load(DM + row * INNER + i, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(kept_row + i, mask=mask, other=0.0).to(tl.float32) * sg
        u = tl.load(kept_row + INNER + i, mask=mask, other=0.0).to(tl.float32) * su
        dg, du, m = _gradients(dm, g, u)
        dg *= tl.load(COL + i, mask=mask, other=0.0)
        du *= tl.load(COL + INNER + i, mask=mask, other=0.0)
        tl.store(d_row + i, to_e4m3(dg * d_inv), mask=mask)
        tl.store(d_row + INNER + i, to_e4m3(du * d_inv), mask=mask)
        tl.store(M8 + row * INNER + i, to_e4m3(m * m_inv), mask=mask)


@jit
def _gradients(dm, g, u):
    sigma = tl.sigmoid(g)
    silu = g * sigma
    return dm * u * sigma * (1.0 + g - silu), dm * silu, silu * u

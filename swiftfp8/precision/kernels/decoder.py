"""One pre-norm decoder layer, attention and SwiGLU, as a single differentiable function in FP8.

    h1 = rmsnorm(x)      q, k, v = rope(h1 W_qkv + LoRA)      a = attention(q, k, v)
    r = x + a W_o + LoRA
    h2 = rmsnorm(r)      m = silu(h2 W_gate + LoRA) (h2 W_up + LoRA)
    y = r + m W_down + LoRA

The backward pass is written out, because what is kept for it decides the memory and what is fused
decides the speed: h1, h2, a and m exist in FP8 only (the matmuls and LoRA both read that), gate and
up are kept as FP8 rows, m is made again from them, residual gradients are added inside the norm's
backward, and the frozen weights' transposes live for one matmul. Attention is Hugging Face's own
function, differentiated by autograd on its own small graph.

Kept per token (bytes; H hidden, Q = heads' width, N_kv, I inner), 2 H for x and 2 H for r, 2 each
for q, k, v and a, 2 I for gate and up, and unless recomputed (`cheap`) H + H + Q for h1, h2 and a
in FP8. With `full` x alone is kept and the layer runs again, all but its last matmul.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from swiftfp8.precision.kernels.group import Group
from swiftfp8.precision.kernels.quantize import quantize_rows
from swiftfp8.precision.kernels.rmsnorm import rmsnorm_backward, rmsnorm_quantize
from swiftfp8.precision.kernels.rope import Heads, finish_qkv_, quantize_qkv_gradient
from swiftfp8.precision.kernels.swiglu import GateUp, swiglu_backward, swiglu_quantize
from swiftfp8.precision.kernels.thin import PackedAdapter

Recompute = Literal["none", "cheap", "full"]
Rows = tuple[torch.Tensor, torch.Tensor]  # FP8 rows and their scales
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(kw_only=True)
class DecoderWeights:
    """What a layer computes with; `groups` in the order qkv, o, gate_up, down."""

    qkv: Group
    o: Group
    gate_up: Group
    down: Group
    norm1_K: torch.Tensor
    norm2_K: torch.Tensor
    eps: float
    heads: Heads
    recompute: Recompute = "cheap"
    keep_gate_up_fp8: bool = True

    @property
    def groups(self) -> tuple[Group, Group, Group, Group]:
        """In the order of their adapters' tensors in `run_layer`."""
        return self.qkv, self.o, self.gate_up, self.down

    def adapter_tensors(self) -> list[torch.Tensor]:
        """Every group's LoRA parameters, in that order."""
        return [t for g in self.groups if g.adapter is not None for t in g.adapter.tensors]


def run_layer(
    x_BSK: torch.Tensor,
    weights: DecoderWeights,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    attention: Attention,
) -> torch.Tensor:
    """The layer's output [B, S, K], differentiable in x and in the adapters' parameters.

    `attention` maps q [B, H, S, D], k and v [B, G, S, D] to [B, S, H, D]; `rotary` is (cos, sin),
    each [P, D], or None where `attention` rotates q and k itself.
    """
    return _Layer.apply(x_BSK, weights, rotary, attention, *weights.adapter_tensors())


@dataclass(kw_only=True)
class Kept:
    """A forward pass's intermediate results; the optional ones may be dropped and made again."""

    x: torch.Tensor
    rstd1: torch.Tensor
    xa_qkv: torch.Tensor | None
    qkv_leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    attended: torch.Tensor  # [B, S, H, D], with autograd's graph down to the leaves
    xa_o: torch.Tensor | None
    r: torch.Tensor
    rstd2: torch.Tensor
    xa_gate_up: torch.Tensor | None
    gate_up: GateUp | None
    sm: torch.Tensor
    xa_down: torch.Tensor | None
    packed: tuple[PackedAdapter | None, ...]
    h1: Rows | None = field(default=None)
    a: Rows | None = field(default=None)
    h2: Rows | None = field(default=None)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_BSK: torch.Tensor,
        weights: DecoderWeights,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        attention: Attention,
        *adapters: torch.Tensor,
    ) -> torch.Tensor:
        # Whether to keep anything: inside a Function grad mode is off, and needs_input_grad is set
        # only where the caller records a graph.
        training = any(ctx.needs_input_grad)
        keep = training and weights.recompute != "full"
        with torch.autocast(x_BSK.device.type, enabled=False):
            y, kept = forward(x_BSK, weights, rotary, attention, keep=keep)
        ctx.weights, ctx.rotary, ctx.attention = weights, rotary, attention
        ctx.kept = kept
        ctx.x = x_BSK if training and not keep else None
        assert y is not None
        return y.view(x_BSK.shape)

    @staticmethod
    def backward(ctx: Any, dy_BSK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        kept = ctx.kept
        with torch.autocast(dy_BSK.device.type, enabled=False):
            if kept is None:
                assert ctx.x is not None, "a layer's graph can be walked back only once"
                _, kept = forward(
                    ctx.x, ctx.weights, ctx.rotary, ctx.attention, keep=True, output=False
                )
            ctx.kept = ctx.x = None
            dx, gradients = backward(
                dy_BSK, kept, ctx.weights, ctx.rotary, need_dx=ctx.needs_input_grad[0]
            )
        return (None if dx is None else dx.view(dy_BSK.shape), None, None, None, *gradients)


def forward(
    x_BSK: torch.Tensor,
    w: DecoderWeights,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    attention: Attention,
    *,
    keep: bool,
    output: bool = True,
) -> tuple[torch.Tensor | None, Kept | None]:
    """The output [T, K] (None without `output`), and what a backward pass needs."""
    batch, length, features = x_BSK.shape
    dtype = x_BSK.dtype
    x = x_BSK.detach().reshape(-1, features).contiguous()
    packed = tuple(group.pack(dtype) for group in w.groups)

    *h1, rstd1 = rmsnorm_quantize(x, w.norm1_K, w.eps)
    qkv = w.qkv.matmul(*h1, dtype)
    xa_qkv = w.qkv.project(*h1, packed[0])
    finish_qkv_(qkv, _lora(xa_qkv, packed[0]), w.qkv.bias_N, *(rotary or (None, None)), w.heads)
    leaves, attended = _attend(qkv.view(batch, length, -1), w.heads, attention, keep)
    del qkv

    a = quantize_rows(attended.detach().reshape(x.shape[0], -1))
    r, xa_o = w.o.forward(*a, packed[1], dtype, residual_TN=x)

    *h2, rstd2 = rmsnorm_quantize(r, w.norm2_K, w.eps)
    gate_up = w.gate_up.matmul(*h2, dtype)
    xa_gate_up = w.gate_up.project(*h2, packed[2])
    m8, sm, kept_gate_up = swiglu_quantize(
        gate_up, _lora(xa_gate_up, packed[2]), keep=keep, keep_fp8=w.keep_gate_up_fp8
    )
    del gate_up

    y = None
    if output:
        y, xa_down = w.down.forward(m8, sm, packed[3], dtype, residual_TN=r)
    else:
        xa_down = w.down.project(m8, sm, packed[3])
    if not keep:
        return y, None
    kept = Kept(
        x=x, rstd1=rstd1, xa_qkv=xa_qkv, qkv_leaves=leaves, attended=attended, xa_o=xa_o,
        r=r, rstd2=rstd2, xa_gate_up=xa_gate_up, gate_up=kept_gate_up, sm=sm, xa_down=xa_down,
        packed=packed,
    )  # fmt: skip
    if w.recompute != "cheap":
        kept.h1, kept.a, kept.h2 = (h1[0], h1[1]), a, (h2[0], h2[1])
    return y, kept


def _lora(
    xa_TR: torch.Tensor | None, packed: PackedAdapter | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if xa_TR is None or packed is None else (xa_TR, packed.b_Nr)


def _attend(
    qkv_BSN: torch.Tensor, heads: Heads, attention: Attention, keep: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """q, k, v as leaves of a graph of attention alone, and its output [B, S, H, D]."""
    batch, length, _ = qkv_BSN.shape
    widths = [heads.query * heads.width, *[heads.key_value * heads.width] * 2]
    q, k, v = (
        part.view(batch, length, -1, heads.width).transpose(1, 2).detach().requires_grad_(keep)
        for part in qkv_BSN.split(widths, -1)
    )
    with torch.set_grad_enabled(keep):
        return (q, k, v), attention(q, k, v)


def backward(
    dy_BSK: torch.Tensor,
    kept: Kept,
    w: DecoderWeights,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    need_dx: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """dx [T, K] and the adapters' gradients, in the order of `DecoderWeights.adapter_tensors`.

    dx is written into `out` where that is given; `kept` is used up.
    """
    dtype = kept.x.dtype
    dy = dy_BSK.reshape(kept.x.shape).contiguous()
    packed = kept.packed
    assert kept.gate_up is not None

    dm, gb_down, db_down = w.down.backward(
        *quantize_rows(dy, w.down.fold_N), kept.xa_down, packed[3], dtype
    )
    assert dm is not None
    d8, sd, m8 = swiglu_backward(dm, kept.gate_up, kept.sm, w.gate_up.fold_N)
    del dm
    kept.gate_up = None
    down = w.down.gradients(m8, kept.sm, gb_down, db_down)
    del m8

    dh2, gb, db = w.gate_up.backward(d8, sd, kept.xa_gate_up, packed[2], dtype)
    del d8
    h2 = kept.h2 or rmsnorm_quantize(kept.r, w.norm2_K, w.eps)[:2]
    gate_up = w.gate_up.gradients(*h2, gb, db)
    del h2
    assert dh2 is not None
    dr, g8, sg = rmsnorm_backward(
        dh2, kept.r, kept.rstd2, w.norm2_K, d_residual_TK=dy, col_scale_K=w.o.fold_N
    )
    del dh2
    assert g8 is not None and sg is not None

    da, gb, db = w.o.backward(g8, sg, kept.xa_o, packed[1], dtype)
    assert da is not None
    a = kept.a or quantize_rows(kept.attended.detach().reshape(da.shape))
    o = w.o.gradients(*a, gb, db)
    del a
    dq, dk, dv = torch.autograd.grad(kept.attended, kept.qkv_leaves, da.view(kept.attended.shape))
    g8, sg = quantize_qkv_gradient(dq, dk, dv, *(rotary or (None, None)), w.qkv.fold_N)
    del dq, dk, dv, da

    dh1, gb, db = w.qkv.backward(g8, sg, kept.xa_qkv, packed[0], dtype, need_dx=need_dx)
    h1 = kept.h1 or rmsnorm_quantize(kept.x, w.norm1_K, w.eps)[:2]
    gradients = w.qkv.gradients(*h1, gb, db) + o + gate_up + down
    if dh1 is None:
        return None, gradients
    dx, _, _ = rmsnorm_backward(
        dh1, kept.x, kept.rstd1, w.norm1_K, d_residual_TK=dr,
        out=None if out is None else out.view(kept.x.shape),
    )  # fmt: skip
    return dx, gradients

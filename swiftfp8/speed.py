"""How long a step is expected to take, in FP8 and in BF16, from shapes alone.

    device = Σ matmul FLOPs / rate + attention FLOPs / rate + elements · cost
    host   = decoder layers · launch + constant
    step   = max(device, host)

A GPU that is fed too slowly waits for the host: in small models, or with few tokens a step, the
many small kernels of an FP8 step cost more to launch than its faster matmuls save. `element` is
the time of all that is no matmul (norms, SwiGLU, casts, LoRA's thin products), for a token, a
layer and one of hidden + intermediate features; `launch` is the host's time for a decoder layer,
forward and backward.

Rates are an H200's. `matmul` and `element` follow from measured steps of a 7B, the fused layers'
`launch`, without and with CUDA graphs, from steps of a 0.5B, Transformer Engine's `launch` and
what full fine-tuning costs from steps of a 1.5B (tests/unit/test_speed.py holds the table). The
other launches are estimates: where the host decides, this is a rule of thumb.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftfp8.hardware import ALL_FP8
from swiftfp8.models.meta import ModelMeta

if TYPE_CHECKING:
    from swiftfp8.plan import Plan

BF16_MATMUL = 692e12
ATTENTION = 450e12
# FP8 counts as slower from this ratio on: the table's times are met within 15%.
SLOWER = 1.15
CONSTANT = 4e-3  # of the host in a step: optimizer, loss, data
RECOMPUTED = {"none": 0.0, "selective": 0.15, "full": 0.33}  # of what is no matmul


@dataclass(frozen=True, kw_only=True)
class Rates:
    """FLOP/s of FP8 matmuls; seconds for an element and for a layer's launches: see above."""

    matmul: float
    element: float
    launch: float


RATES = {
    "bf16": Rates(matmul=BF16_MATMUL, element=5.9e-11, launch=5.7e-3),
    "bf16, full": Rates(matmul=BF16_MATMUL, element=3.8e-11, launch=3.0e-3),
    "te": Rates(matmul=1172e12, element=4.4e-11, launch=8.6e-3),
    "torch": Rates(matmul=1423e12, element=4.4e-11, launch=5.0e-3),
    "torch, fused": Rates(matmul=1423e12, element=2.0e-11, launch=4.4e-3),
    "torch, graphs": Rates(matmul=1423e12, element=1.9e-11, launch=0.9e-3),
    "torch, compiled": Rates(matmul=1423e12, element=3.0e-11, launch=2.7e-3),
}


def step_seconds(plan: Plan, meta: ModelMeta, *, micro_batch: int, max_length: int) -> float | None:
    """Seconds of a micro-batch under `plan`, or None where nothing is known of its engine."""
    rates = RATES.get(_engine(plan))
    if plan.device != "cuda" or rates is None:
        return None
    tokens = micro_batch * max_length
    again = 2 if plan.gradient_checkpointing == "full" else 0
    device = 0.0
    for layer in plan.layers:
        flops = (6 if layer.trainable else 4) + again
        rate = rates.matmul if layer.precision in ALL_FP8 else BF16_MATMUL
        device += flops * layer.flops * tokens / rate
    # Causal: 2 forward and 5 backward for each token, and each that it sees, on average S / 2.
    width = meta.num_heads * meta.head_dim
    device += 7 * max_length * width * tokens * meta.num_layers / ATTENTION
    features = meta.hidden_size + meta.intermediate_size
    more = 1 + RECOMPUTED[plan.gradient_checkpointing]
    device += rates.element * more * features * tokens * meta.num_layers
    host = rates.launch * more * meta.num_layers + CONSTANT
    return max(device, host)


def _engine(plan: Plan) -> str:
    if plan.backend is None:
        trained = f"{plan.compute_dtype}, {plan.tuner}"
        return trained if trained in RATES else plan.compute_dtype
    if plan.backend == "torch" and plan.fusion.compiled:
        return "torch, compiled"
    if plan.backend == "torch" and plan.fusion.layers == plan.fusion.total:
        return "torch, graphs" if plan.fusion.graphs else "torch, fused"
    return plan.backend

"""How much memory a training step peaks at, from shapes alone, and which batch would fit.

All sizes in bytes; c is the bytes of the compute dtype (2 for BF16 and FP16, 4 for FP32).

**Weights.** A frozen FP8 weight is 1 byte (+ a 4-byte scale per 128 x 128 block, or 1 byte per 32
values for MXFP8), everything else c. Ada's and Hopper's FP8 matmul reads both operands along the
summed dimension, so the backward pass needs each weight's transpose: made for one layer at a time
and dropped, it costs one layer's byte, not the model's. MXFP8 scales rows and columns apart and
keeps both. With `tuner=full` weights stay in c (FP16 trains FP32 ones), and Transformer Engine's
FP8 copies, with their transposes, live from the forward to the backward pass on top.

**What is trained.** LoRA: FP32 adapters, gradients, two Adam moments: 16 bytes a parameter. Full:
the gradient in the weight's dtype, two moments in FP32 or BF16, and 2 bytes that make a BF16 weight
an exact FP32 master (train/masters.py); BF16 without masters keeps its moments in BF16.

**Activations and logits** are counted in activations.py. The estimate is what is kept until the
backward pass, and the larger of two things that pass: the logits, and one layer's backward.
Gradients are counted beside them where micro-batches accumulate; without accumulation they come as
activations go, and only what they exceed those by is counted.

Checked against peaks measured on an H200 (tests/unit/test_memory.py), within 10%.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swiftfp8.activations import Job, count_activations, fp8_head, logit_bytes
from swiftfp8.hardware import ALL_FP8, GIB, Hardware
from swiftfp8.models.meta import ModelMeta

if TYPE_CHECKING:
    from swiftfp8.plan import LayerPlan

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MOST_ROWS = 2**20
# States of a trained parameter, in its own dtype's size, where they are not Adam's two; Adafactor's
# are a matrix's rows and columns.
MOMENTS = {"adafactor": 0.0, "lion": 1.0}
MASTER_BYTES = {"fp32": 4 + 4 + 2, "bf16": 2 + 2 + 2}  # two moments, a master's remainder
# What the framework takes beside tensors: CUDA context and cuBLAS, or Python and its libraries.
WORKSPACE_GIB = {"cuda": 0.75, "cpu": 0.5}
# Share of a device that tensors can fill: the rest is lost to fragments, or to other programs.
USABLE = {"cuda": 0.95, "cpu": 0.9}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of a training step in GiB, by what holds it, and the batch that would fit."""

    weights: float
    transposes: float
    adapters: float
    optimizer: float
    gradients: float
    activations: float
    logits: float
    workspace: float
    available: float
    largest_micro_batch: int  # rows of max_length that fit; 0 where not even one does
    micro_batch: int = 0  # rows that the parts above are for
    max_length: int = 0  # tokens a row

    @property
    def total(self) -> float:
        """Sum of the parts, GiB."""
        return (
            self.weights
            + self.transposes
            + self.adapters
            + self.optimizer
            + self.gradients
            + self.activations
            + self.logits
            + self.workspace
        )


def estimate_memory(
    meta: ModelMeta,
    hardware: Hardware,
    layers: Sequence[LayerPlan],
    *,
    compute_dtype: str,
    backend: str | None,
    tuner: str,
    lora_rank: int,
    micro_batch: int,
    max_length: int,
    checkpointing: str = "none",
    fused_layers: int = 0,
    fused_loss: bool = False,
    attn_implementation: str = "sdpa",
    packing: bool = False,
    master_weights: bool = False,
    state_dtype: str = "fp32",
    optimizer: str = "adamw_torch",
    dora: bool = False,
    pissa: bool = False,
    ema: bool = False,
    compiled: bool = False,
    swiglu: bool = False,
    accumulates: bool = False,
) -> MemoryEstimate:
    """Estimate the peak of a step of `micro_batch` rows of `max_length` tokens.

    `layers` is the plan of every linear. `lora_rank` is ignored where no layer has LoRA.
    `checkpointing` is "none", "selective" or "full"; `fused_layers` decoder layers are run as one
    function by the torch backend. `master_weights`: trained BF16 weights have FP32 masters,
    and moments of `state_dtype`, "fp32" or "bf16"; other optimizers keep `MOMENTS`. `dora` measures
    the rows of one weight at a time, `pissa` remembers what the adapters began as. Where a step
    `accumulates` micro-batches, gradients are there from the second one on; otherwise they take the
    activations' place.
    """
    c = DTYPE_BYTES[compute_dtype]
    moments = MOMENTS.get(optimizer, 2.0)
    if optimizer == "muon":  # AdamW, with its two, steps what is no matrix of a layer
        moments = 2.0 - _muon_share(meta, layers, tuner, lora_rank)
    if optimizer == "adamw_8bit":  # a byte each, whatever the weight is in
        moments = 2 / (4 if tuner == "lora" or compute_dtype == "fp16" else c)
    fixed = _without_tokens(meta, hardware, layers, c, compute_dtype, backend, tuner, lora_rank)
    fixed = replace(fixed, optimizer=fixed.optimizer * moments / 2)
    if ema:  # an FP32 copy of what is trained
        copies = {"full": meta.total_params * 4, "freeze": _trained(layers) * 4}
        held = copies[tuner] / GIB if tuner in copies else fixed.adapters
        fixed = replace(fixed, optimizer=fixed.optimizer + held)
    if pissa:
        first = sum(_adapter_size(layer, lora_rank) for layer in layers if layer.lora)
        fixed = replace(fixed, adapters=fixed.adapters + 4 * first / GIB)
    if dora:  # one weight, and with its update, in FP32
        largest = max((_size(layer) / layer.count for layer in layers if layer.lora), default=0)
        fixed = replace(fixed, workspace=fixed.workspace + 2 * 4 * largest / GIB)
    if master_weights:
        trained = meta.total_params if tuner == "full" else _trained(layers)
        states = trained * (MASTER_BYTES[state_dtype] + (4 if ema else 0))
        fixed = replace(fixed, optimizer=states / GIB)
    job = Job(
        c=c,
        device=hardware.device,
        backend=backend,
        checkpointing=checkpointing,
        fused_layers=fused_layers,
        fused_loss=fused_loss,
        lora_rank=lora_rank if any(layer.lora for layer in layers) else 0,
        max_length=max_length,
        attn_implementation=attn_implementation,
        packing=packing,
        trained_head=_trains_head(meta, layers, tuner),
        compiled=compiled,
        swiglu=swiglu,
    )
    count = count_activations(meta, layers, job)

    def step(rows: int) -> MemoryEstimate:
        tokens = rows * max_length
        logits = logit_bytes(meta, layers, job, tokens)
        passing = count.passing * tokens + count.passing_fixed
        activations = count.kept * tokens + count.kept_fixed + max(0.0, passing - logits)
        instead = 0.0 if accumulates else (activations + logits) / GIB
        return replace(
            fixed,
            gradients=max(0.0, fixed.gradients - instead),
            activations=activations / GIB,
            logits=logits / GIB,
            micro_batch=rows,
            max_length=max_length,
        )

    fits = _largest(lambda rows: step(rows).total <= fixed.available)
    return replace(step(micro_batch), largest_micro_batch=fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number of rows that fits, 0 where not even one does."""
    low, high = 0, 1
    while fits(high) and high < MOST_ROWS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _without_tokens(
    meta: ModelMeta,
    hardware: Hardware,
    layers: Sequence[LayerPlan],
    c: int,
    compute_dtype: str,
    backend: str | None,
    tuner: str,
    lora_rank: int,
) -> MemoryEstimate:
    """The parts that do not grow with the batch; activations and logits are left at 0."""
    fp8 = [layer for layer in layers if layer.precision in ALL_FP8]
    fp8_params = sum(_size(layer) for layer in fp8)
    adapter_params = sum(_adapter_size(layer, lora_rank) for layer in layers if layer.lora)
    if tuner == "lora":  # modules_to_save: a second, trained copy
        adapter_params += sum(_size(layer) for layer in layers if layer.trainable)
    transposes = _transpose_bytes(fp8, hardware, tuner) if backend == "te" else 0
    if tuner == "full":
        weight_bytes = 4 if compute_dtype == "fp16" else c
        weights = float(meta.total_params * weight_bytes)
        trained = weights
        copies = float(fp8_params + transposes) if backend == "te" else 0.0
    else:
        head = fp8_head(meta, layers)  # a tied one is a copy: the embedding keeps its own
        replaced = fp8_params - (_size(head) if head is not None and meta.tied_head else 0)
        weights = (meta.total_params - replaced) * c + sum(_fp8_bytes(layer) for layer in fp8)
        trained = adapter_params * 4.0
        if tuner == "freeze":  # norms are left out: they are few
            size = 4 if compute_dtype == "fp16" else c
            held = sum(_size(x) * (size - c) for x in layers if x.trainable)
            kept = [x for x in fp8 if x.trainable]  # in high precision, under FP8 matmuls
            weights += held + sum(_size(x) * c - _fp8_bytes(x) for x in kept)
            trained = float(_trained(layers) * size)
        copies = float(transposes)
    workspace = WORKSPACE_GIB[hardware.device]
    if backend == "emulated" and fp8:  # one weight at a time is dequantized
        workspace += max(_size(layer) / layer.count for layer in fp8) * c / GIB
    return MemoryEstimate(
        weights=weights / GIB,
        transposes=copies / GIB,
        adapters=adapter_params * 4 / GIB,
        optimizer=2 * trained / GIB,
        gradients=trained / GIB,
        activations=0.0,
        logits=0.0,
        workspace=workspace,
        available=hardware.memory_gib * USABLE[hardware.device],
        largest_micro_batch=0,
    )


def _muon_share(meta: ModelMeta, layers: Sequence[LayerPlan], tuner: str, lora_rank: int) -> float:
    """Share of the trained parameters that Muon steps: matrices of layers, A and B among them."""
    inside = {linear.name for linear in meta.linears if linear.layer is not None}
    whole = {x.name: _size(x) for x in layers if x.trainable}
    adapters = {x.name: _adapter_size(x, lora_rank) for x in layers if x.lora}
    matrices = sum(
        size for part in (whole, adapters) for name, size in part.items() if name in inside
    )
    total = sum(whole.values()) + sum(adapters.values())
    return matrices / max(1, meta.total_params if tuner == "full" else total)


def _trains_head(meta: ModelMeta, layers: Sequence[LayerPlan], tuner: str) -> bool:
    """Whether the output head's gradient is made in the loss."""
    heads = {linear.name for linear in meta.linears if linear.kind == "head"}
    return tuner == "full" or any(layer.trainable for layer in layers if layer.name in heads)


def _trained(layers: Sequence[LayerPlan]) -> int:
    """Parameters of trained linears."""
    return sum(_size(layer) for layer in layers if layer.trainable)


def _adapter_size(layer: LayerPlan, lora_rank: int) -> int:
    return (layer.lora_rank or lora_rank) * (layer.in_features + layer.out_features) * layer.count


def _size(layer: LayerPlan) -> int:
    return layer.in_features * layer.out_features * layer.count


def _fp8_bytes(layer: LayerPlan) -> float:
    """A quantized weight with its scales."""
    scales = {"mxfp8": 1 / 32, "fp8_block": 4 / (128 * 128)}
    return _size(layer) * (1 + scales.get(layer.precision, 0.0))


def _transpose_bytes(fp8: Sequence[LayerPlan], hardware: Hardware, tuner: str) -> int:
    """Bytes of second, column-wise copies that are alive at the same time."""
    if any(layer.precision == "mxfp8" for layer in fp8):
        return sum(_size(layer) for layer in fp8)
    if hardware.sm is not None and hardware.sm >= (10, 0):  # multiplies in any layout
        return 0
    if tuner == "full":
        return sum(_size(layer) for layer in fp8)
    return max((_size(layer) // layer.count for layer in fp8), default=0)

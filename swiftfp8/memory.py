"""How much memory a training step peaks at, from shapes alone, and which batch would fit.

All sizes in bytes; c is the bytes of the compute dtype (2 for BF16 and FP16, 4 for FP32), T the
tokens of a micro-batch, L the decoder layers, h hidden size, i intermediate size, q heads x
head_dim, V the vocabulary.

**Weights.** A frozen FP8 weight is 1 byte (+ a 4-byte scale per 128 x 128 block, or 1 byte per 32
values for MXFP8), everything else c. Ada's and Hopper's FP8 matmul reads both operands along the
summed dimension, so the backward pass needs each weight's transpose: made for one layer at a time
and dropped, it costs one layer's byte, not the model's. MXFP8 scales rows and columns apart and
keeps both. With `tuner=full` weights stay in c (FP16 trains FP32 ones), and Transformer Engine's
FP8 copies, with their transposes, live from the forward to the backward pass on top.

**What is trained.** LoRA: FP32 adapters, gradients, two Adam moments: 16 bytes a parameter. Full:
the gradient in the weight's dtype, two moments in FP32, and 2 bytes that make a BF16 weight an
exact FP32 master (train/masters.py); BF16 without masters keeps its moments in BF16.

**Activations**, what autograd saves per token and layer of a Hugging Face decoder (pre-norm
attention and SwiGLU; norms compute in FP32 and save their FP32 input):

    two norms                                  8h          (full: + 2ch for the normalised values)
    q, k, v after rotation, attention output   4cq         (k, v repeated for all heads)
    gate, silu(gate), up                       3ci
    inputs of q/k/v, of gate/up, of down       c(h + h + i), each only where a linear that reads it
                                               has LoRA or is trained; with FP8 and tuner=full 1
                                               byte in place of c (o's is the attention output)
    eager attention                            heads x S x (4 + c), its S x S probabilities
    packed rows under sdpa                     cS, the S x S mask that its kernel makes and keeps

With gradient checkpointing each layer keeps its input alone, ch, and one layer at a time is
recomputed; that layer's share counts only where it exceeds the logits, which are gone by then.

**Logits.** The loss upcasts them: FP32 log-softmax and two gradients in flight, 12 bytes each, of
T x V values. Gradients are counted in full beside them, as from the second micro-batch of an
accumulation on; without accumulation a full fine-tune peaks lower by about that much.

Checked against peaks measured on an H200 (tests/unit/test_memory.py): LoRA within 5%, full
fine-tuning at most 15% too high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swiftfp8.hardware import ALL_FP8, GIB, Hardware
from swiftfp8.loss_plan import CHUNK_ELEMENTS, chunk_rows
from swiftfp8.models.meta import ModelMeta

if TYPE_CHECKING:
    from swiftfp8.plan import LayerPlan

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
LOGIT_BYTES = 12
CPU_CHUNK_BYTES = 16  # of a logit in the fused loss, without the GPU's kernel that works in place
MASTER_BYTES = 4 + 4 + 2  # moments in FP32, a master's remainder
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
    gradient_checkpointing: bool,
    attn_implementation: str = "sdpa",
    packing: bool = False,
    master_weights: bool = False,
    fused_loss: bool = False,
) -> MemoryEstimate:
    """Estimate the peak of a step of `micro_batch` rows of `max_length` tokens.

    `layers` is the plan of every linear. `lora_rank` is ignored where no layer has LoRA.
    `master_weights`: trained BF16 weights have FP32 masters.
    """
    c = DTYPE_BYTES[compute_dtype]
    fixed = _without_tokens(meta, hardware, layers, c, compute_dtype, backend, tuner, lora_rank)
    if master_weights:
        fixed = replace(fixed, optimizer=meta.total_params * MASTER_BYTES / GIB)
    probabilities = meta.num_heads * max_length * (4 + c) if attn_implementation == "eager" else 0
    mask = max_length * c if packing and attn_implementation == "sdpa" else 0
    per_layer = _layer_bytes(meta, layers, c, backend) + probabilities + mask
    logits = float(meta.vocab_size * LOGIT_BYTES)
    if fused_loss:
        logits = 3.0 * c * meta.hidden_size  # the last hidden state, its gradient, that scaled
        chunk = _chunk_bytes(meta, layers, hardware.device, c, micro_batch * max_length)
        fixed = replace(fixed, logits=chunk / GIB)
    if gradient_checkpointing:
        activations = meta.num_layers * meta.hidden_size * c + max(0.0, per_layer - logits)
    else:
        activations = meta.num_layers * per_layer
    row = (activations + logits) * max_length / GIB
    room = int((fixed.available - fixed.total) / row)
    return replace(
        fixed,
        activations=activations * max_length * micro_batch / GIB,
        logits=fixed.logits + logits * max_length * micro_batch / GIB,
        largest_micro_batch=max(0, room),
        micro_batch=micro_batch,
        max_length=max_length,
    )


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
    adapter_params = sum(
        lora_rank * (layer.in_features + layer.out_features) * layer.count
        for layer in layers
        if layer.lora
    )
    transposes = _transpose_bytes(fp8, hardware, tuner) if backend == "te" else 0
    if tuner == "full":
        weight_bytes = 4 if compute_dtype == "fp16" else c
        weights = float(meta.total_params * weight_bytes)
        trained = weights
        copies = float(fp8_params + transposes) if backend == "te" else 0.0
    else:
        head = _fp8_head(meta, layers)  # a tied one is a copy: the embedding keeps its own
        replaced = fp8_params - (_size(head) if head is not None and meta.tied_head else 0)
        weights = (meta.total_params - replaced) * c + sum(_fp8_bytes(layer) for layer in fp8)
        trained = adapter_params * 4.0
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


def _layer_bytes(
    meta: ModelMeta, layers: Sequence[LayerPlan], c: int, backend: str | None
) -> float:
    """Bytes that one decoder layer saves per token, without attention probabilities."""
    h, i, q = meta.hidden_size, meta.intermediate_size, meta.num_heads * meta.head_dim
    decoder = {linear.name for linear in meta.linears if linear.kind == "linear"}
    inputs: dict[tuple[str, int], int] = {}
    trained = False
    for layer in layers:
        if layer.name not in decoder or not (layer.lora or layer.trainable):
            continue
        trained = trained or layer.trainable
        if layer.in_features == q and q not in (h, i):
            continue  # the attention output, which attention itself saves
        held_in_fp8 = layer.trainable and backend == "te" and layer.precision in ALL_FP8
        key = (layer.name.rpartition(".")[0], layer.in_features)
        inputs[key] = max(inputs.get(key, 0), layer.in_features * (1 if held_in_fp8 else c))
    norms = 8 * h + (2 * c * h if trained else 0)
    return norms + 4 * c * q + 3 * c * i + sum(inputs.values()) / max(1, meta.num_layers)


def _fp8_head(meta: ModelMeta, layers: Sequence[LayerPlan]) -> LayerPlan | None:
    heads = {linear.name for linear in meta.linears if linear.kind == "head"}
    return next((x for x in layers if x.name in heads and x.precision in ALL_FP8), None)


def _chunk_bytes(
    meta: ModelMeta, layers: Sequence[LayerPlan], device: str, c: int, tokens: int
) -> float:
    """What the fused loss holds for one chunk of logits; an FP8 head is transposed besides."""
    rows = min(tokens, chunk_rows(meta.vocab_size, CHUNK_ELEMENTS[device]))
    per_logit = c if device == "cuda" else CPU_CHUNK_BYTES
    head = _fp8_head(meta, layers)
    if head is None:
        return float(rows * meta.vocab_size * per_logit)
    return float(rows * meta.vocab_size * (per_logit + 1) + _size(head))


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

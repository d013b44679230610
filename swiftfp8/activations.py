"""Bytes of activations, a token, that a training step keeps and that it holds for a moment.

c is the bytes of the compute dtype; h hidden size, i intermediate size, q and n the width of all
query and of all key heads, S the length of a row, L the decoder layers.

**A Hugging Face decoder layer** under autograd (norms compute in FP32 and save their FP32 input):

    two norms                                  8h          (full: + 2ch for the normalised values)
    q, k, v after rotation, attention output   4cq         (k, v repeated for all heads)
    gate, silu(gate), up                       3ci
    inputs of q/k/v, of gate/up, of down       c(h + h + i), each only where a linear that reads it
                                               has LoRA or is trained; with FP8 and tuner=full 1
                                               byte in place of c (o's is the attention output)
    eager attention                            heads x S x (4 + c), its S x S probabilities
    packed rows under sdpa                     cS, the S x S mask that its kernel makes and keeps

**A fused layer** of the `torch` backend, as precision/kernels/decoder.py lists it:

    x, r (the residual after attention)        2ch
    q, k, v, attention output                  c(2q + 2n)  (packed rows: k, v repeated, + 2c(q - n))
    gate and up as FP8 rows                    2i
    h1, h2, attention output as FP8 rows       2h + q      (not kept by `selective`)
    normalised q and k (Qwen3)                 (4 + c)(q + n)
    scales, 1/rms, log-sum-exp, LoRA's x Aᵀ    32 + 4 heads + c per rank and linear

**A compiled layer** (trained weights on the `torch` backend) keeps in the compute dtype, without
the FP32 copies, c(4h + 2q + 2n + 3i): the residual twice, both norms' outputs, q, k, v, attention's
output, gate, up and their product (2i where SwiGLU runs as one function, without it).

`selective` on other models keeps what matmuls and attention put out, c(3h + 2q + 2n + 2i), and
makes the rest again. `full` keeps a layer's input alone, ch, and makes everything again.

**For a moment**, on top: what recomputing one layer brings back, and the widest point of a layer's
backward pass: gate, up and their product (fused: BF16 gate and up beside the FP8 product), and a
frozen weight's transpose. Chunks of logits live at another time: the larger of the two counts.
A fused layer also packs its adapters in the compute dtype, B twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftfp8.hardware import ALL_FP8
from swiftfp8.loss_plan import CHUNK_ELEMENTS, TRAINED_HEAD_CHUNK, chunk_rows
from swiftfp8.models.meta import ModelMeta

if TYPE_CHECKING:
    from swiftfp8.plan import LayerPlan

MASKLESS = ("flash_attention_2", "flex_attention")  # packed rows need no S x S mask there
LOGIT_BYTES = 12  # of a logit in the plain loss: FP32 log-softmax and two gradients in flight
CPU_CHUNK_BYTES = 16  # of one in the fused loss, without the GPU's kernel that works in place


@dataclass(frozen=True, kw_only=True)
class Job:
    """What of a run its activations depend on.

    `checkpointing` is "none", "selective" or "full"; `fused_layers` decoder layers run as one
    function, `compiled` ones go through torch.compile, and keep no product of gate and up where
    `swiglu` runs as one function; `lora_rank` is 0 where nothing has LoRA.
    """

    c: int
    device: str
    backend: str | None
    checkpointing: str
    fused_layers: int
    fused_loss: bool
    lora_rank: int
    max_length: int
    attn_implementation: str
    packing: bool
    trained_head: bool = False
    compiled: bool = False
    swiglu: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """`kept` by all layers until their backward pass and `passing` in one, bytes a token.

    `kept_fixed` and `passing_fixed` are bytes whatever the tokens.
    """

    kept: float
    passing: float
    kept_fixed: float = 0.0
    passing_fixed: float = 0.0


def count_activations(meta: ModelMeta, layers: Sequence[LayerPlan], job: Job) -> TokenBytes:
    """Bytes of all decoder layers together, the fused and the others."""
    fused, others = job.fused_layers, meta.num_layers - job.fused_layers
    parts = []
    if fused:
        parts.append((fused, _fused_layer(meta, layers, job)))
    if others:
        parts.append((others, _plain_layer(meta, layers, job)))
    tail = 3.0 * job.c * meta.hidden_size  # in and out of the last norm, and its gradient
    return TokenBytes(
        kept=tail + sum(count * part.kept for count, part in parts),
        kept_fixed=sum(count * part.kept_fixed for count, part in parts),
        passing=max((part.passing for _, part in parts), default=0.0),
        passing_fixed=max((part.passing_fixed for _, part in parts), default=0.0),
    )


def logit_bytes(meta: ModelMeta, layers: Sequence[LayerPlan], job: Job, tokens: int) -> float:
    """Bytes of logits and of what a loss makes of them, for all tokens of a micro-batch."""
    if not job.fused_loss:
        return float(meta.vocab_size * LOGIT_BYTES * tokens)
    elements = CHUNK_ELEMENTS[job.device]
    if job.trained_head and job.device == "cuda":
        elements *= TRAINED_HEAD_CHUNK
    rows = min(tokens, chunk_rows(meta.vocab_size, elements))
    chunk = float(rows * meta.vocab_size * (job.c if job.device == "cuda" else CPU_CHUNK_BYTES))
    weight = meta.vocab_size * meta.hidden_size
    if fp8_head(meta, layers) is not None:  # gradients as FP8 rows, and the transposed weight
        chunk += rows * meta.vocab_size + weight
    if job.trained_head:  # its gradient is summed in FP32, then scaled in another copy
        chunk += 8 * weight
    return chunk


def fp8_head(meta: ModelMeta, layers: Sequence[LayerPlan]) -> LayerPlan | None:
    """The output head, where it is planned in FP8."""
    heads = {linear.name for linear in meta.linears if linear.kind == "head"}
    return next((x for x in layers if x.name in heads and x.precision in ALL_FP8), None)


def _widths(meta: ModelMeta) -> tuple[int, int, int, int]:
    return (
        meta.hidden_size,
        meta.intermediate_size,
        meta.num_heads * meta.head_dim,
        meta.num_kv_heads * meta.head_dim,
    )


def _fused_layer(meta: ModelMeta, layers: Sequence[LayerPlan], job: Job) -> TokenBytes:
    h, i, q, n = _widths(meta)
    c = job.c
    kept = 2 * c * h + c * (2 * q + 2 * n) + 2 * i + 2 * h + q
    kept += 32 + 4 * meta.num_heads + 7 * c * job.lora_rank
    if meta.qk_norm:
        kept += (4 + c) * (q + n)
    if job.packing and job.attn_implementation not in MASKLESS:
        kept += c * job.max_length + 2 * c * (q - n)
    adapted = [layer for layer in layers if layer.lora]
    packed = sum(c * job.lora_rank * (x.in_features + 2 * x.out_features) for x in adapted)
    packed /= max(1, meta.num_layers)
    transposed = 2.0 * i * h
    passing = max(2 * c * i + i, c * i + 3 * i) + 3 * c * h
    if job.checkpointing == "full":
        passing += kept - c * h
        return TokenBytes(kept=c * h, passing=passing, passing_fixed=packed + transposed)
    if job.checkpointing == "selective":
        kept -= 2 * h + q + 12
    return TokenBytes(kept=kept, passing=passing, kept_fixed=packed, passing_fixed=transposed)


def _plain_layer(meta: ModelMeta, layers: Sequence[LayerPlan], job: Job) -> TokenBytes:
    h, i, q, n = _widths(meta)
    c = job.c
    everything = _saved_by_autograd(meta, layers, job)
    if job.compiled:
        everything = float(c * (4 * h + 2 * q + 2 * n + (2 if job.swiglu else 3) * i))
    if job.attn_implementation == "eager":
        everything += meta.num_heads * job.max_length * (4 + c)
    if job.packing and job.attn_implementation == "sdpa":
        everything += job.max_length * c
    passing = float(c * (2 * i + 3 * h))
    if job.checkpointing == "none":
        return TokenBytes(kept=everything, passing=passing)
    # Unfused layers of the torch backend recompute in full: see precision/_selective.py.
    if job.checkpointing == "selective" and job.backend != "torch":
        kept = float(c * (3 * h + 2 * q + 2 * n + 2 * i))
        return TokenBytes(kept=kept, passing=passing + everything - kept)
    return TokenBytes(kept=c * h, passing=passing + everything)


def _saved_by_autograd(meta: ModelMeta, layers: Sequence[LayerPlan], job: Job) -> float:
    """The table's first five lines for one layer."""
    h, i, q, _ = _widths(meta)
    decoder = {linear.name for linear in meta.linears if linear.kind == "linear"}
    inputs: dict[tuple[str, int], int] = {}
    trained = False
    for layer in layers:
        if layer.name not in decoder or not (layer.lora or layer.trainable):
            continue
        trained = trained or layer.trainable
        if layer.in_features == q and q not in (h, i):
            continue  # the attention output, which attention itself saves
        held_in_fp8 = layer.trainable and job.backend == "te" and layer.precision in ALL_FP8
        key = (layer.name.rpartition(".")[0], layer.in_features)
        inputs[key] = max(inputs.get(key, 0), layer.in_features * (1 if held_in_fp8 else job.c))
    norms = 8 * h + (2 * job.c * h if trained else 0)
    total = norms + 4 * job.c * q + 3 * job.c * i
    return total + sum(inputs.values()) / max(1, meta.num_layers)

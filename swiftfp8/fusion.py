"""Which decoder layers the `torch` backend runs as one function, decided without the weights.

The fused layer (precision/kernels/decoder.py) writes out one form: pre-norm attention and SwiGLU,
plain residuals, rotary positions in every layer. A model's own code may differ from it in what no
attribute shows (a factor on a residual, a layer without positions), so only architectures that are
tested against their own forward pass are fused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftfp8.models.meta import ModelMeta

if TYPE_CHECKING:
    from swiftfp8.plan import LayerPlan

FUSED_RECIPE = "fp8_current"
# Their decoder layers are the same under every head: ForCausalLM, ForSequenceClassification, none.
FUSED_FAMILIES = ("Llama", "Ministral", "Mistral", "Qwen2", "Qwen3")
HEADS = ("ForCausalLM", "ForSequenceClassification", "Model")
FUSED_ARCHITECTURES = frozenset(family + head for family in FUSED_FAMILIES for head in HEADS)


@dataclass(frozen=True, kw_only=True)
class FusionPlan:
    """How many of the decoder layers run fused; `reason` is why the others do not.

    `graphs`: fused layers are replayed as CUDA graphs; `compiled`: layers whose weights are trained
    go through torch.compile, and with `swiglu` their three matmuls of the MLP are one function.
    """

    layers: int
    total: int
    reason: str | None
    graphs: bool = False
    compiled: bool = False
    swiglu: bool = False


MIXED_LORA = "adapters that read one input differ in rank or alpha (rank_pattern, alpha_pattern)"
TRAINED = "its weights are trained, and fused layers hold theirs in FP8 alone"
DORA = "DoRA divides each output by the length of a weight's row (use_dora)"
FLEX = "flex attention is compiled by itself (attn_implementation)"
NO_FUSION = FusionPlan(layers=0, total=0, reason="not planned")


def why_not_fused(meta: ModelMeta, *, tuner: str, lora_dropout: float) -> str | None:
    """Why none of the model's decoder layers can be fused, or None where its form allows it."""
    if tuner == "full":
        return "its weights are trained (tuner=full), and fused layers hold theirs in FP8 alone"
    if lora_dropout > 0:
        return f"LoRA has dropout (lora_dropout={lora_dropout:g})"
    return why_other_form(meta)


def why_other_form(meta: ModelMeta) -> str | None:
    """Why the model's decoder layers are not of the form that is tested, or None where they are."""
    if meta.unfused_layers is not None:
        return meta.unfused_layers
    if meta.architecture not in FUSED_ARCHITECTURES:
        return f"{meta.architecture} is not among the architectures that are tested fused"
    return None


def plan_fusion(
    layers: Sequence[LayerPlan],
    meta: ModelMeta,
    *,
    backend: str | None,
    tuner: str,
    lora_dropout: float,
    device: str,
    mixed: Collection[int] = (),
    apart: str | None = None,
    compiles: bool = True,
    graphs: bool = True,
) -> FusionPlan:
    """The decoder layers whose linears are all in FP8 on the `torch` backend.

    `mixed` are layers whose adapters have shapes that can't be joined; `apart` says why none may be
    fused, whatever the model.
    `compiles` and `graphs` are what the user allows; both need a CUDA device.
    """
    total = meta.num_layers
    if backend != "torch":
        return FusionPlan(layers=0, total=total, reason="only the torch backend fuses layers")
    reason = why_not_fused(meta, tuner=tuner, lora_dropout=lora_dropout)
    reason = reason or apart
    if reason is not None:
        compiled = tuner == "full" and compiles and device == "cuda"
        swiglu = compiled and why_other_form(meta) is None
        return FusionPlan(layers=0, total=total, reason=reason, compiled=compiled, swiglu=swiglu)
    numbers = {linear.name: linear.layer for linear in meta.linears}
    high = {numbers[x.name]: x.reason for x in layers if x.precision != FUSED_RECIPE}
    high |= {numbers[x.name]: TRAINED for x in layers if x.trainable}
    high.pop(None, None)  # the head
    high |= {layer: MIXED_LORA for layer in mixed if layer not in high}
    reasons = Counter(high.values()).most_common(1)
    why = None
    if reasons:
        why = reasons[0][0]
        why = why if why in (MIXED_LORA, TRAINED) else f"a linear in them is not in FP8: {why}"
    fused = total - len(high)
    recorded = graphs and fused > 0 and device == "cuda"
    return FusionPlan(layers=fused, total=total, reason=why, graphs=recorded)

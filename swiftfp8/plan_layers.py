"""What each linear gets, and why: the reasons that keep one out of FP8, and the coverage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swiftfp8.ladder import Fallback, Granted
from swiftfp8.loss_plan import LossPlan
from swiftfp8.models.meta import LinearMeta, ModelMeta
from swiftfp8.plan_types import FP8_RECIPES, LayerPlan
from swiftfp8.selection import matches
from swiftfp8.tuning import lora_shape

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config, PrecisionConfig

HIGH_HEAD = "output head: rounding it moves every token's probability"
_KEPT_HIGH = {
    "experts": "experts are one 3-D parameter, not a linear: no backend runs them in FP8 yet",
    "router": "router: rounding it sends tokens to other experts",
    "score": "score head: few outputs, all of which count, and trained from nothing: FP32 always",
    "pooler": "pooler: it sees one token a row, and the score reads it",
    "unused": "unused: the task reads the tokens themselves",
}
# In and out features of a weight must be multiples of this.
SHAPE_MULTIPLE = {"mxfp8": 32, "fp8_block": 128, "fp8_current": 16, "fp8_delayed": 16}


def plan_layer(
    linear: LinearMeta,
    granted: Granted,
    config: Config,
    meta: ModelMeta,
    high_head: str | None,
    *,
    lora: bool,
    saved: bool = False,
    trained: bool = False,
) -> LayerPlan:
    """One linear's precision with its reason; `high_head` is why a head stays out of FP8.

    `saved`: trained whole beside LoRA (`modules_to_save`); `trained`: by tuner=full or freeze.
    """
    scores = linear.kind == "score"
    high_reason: str | None
    if scores:
        high_reason = _KEPT_HIGH["score"]
    elif granted.recipe is None:
        high_reason = granted.high_reason
    elif saved:
        high_reason = "modules_to_save: trained whole, in FP32"
    elif linear.kind == "head" and high_head is not None:
        high_reason = high_head
    else:
        high_reason = _why_high(linear, granted.recipe, config.precision, meta)
    if high_reason is None:
        assert granted.recipe is not None
        precision = granted.recipe
        reason = f"features divide by {SHAPE_MULTIPLE[precision]}"
    else:
        precision, reason = "fp32" if scores else granted.compute_dtype, high_reason
    return LayerPlan(
        name=linear.name,
        in_features=linear.in_features,
        out_features=linear.out_features,
        bias=linear.bias,
        precision=precision,
        reason=reason,
        lora=lora,
        trainable=trained or scores or saved,
        count=linear.count,
        lora_rank=_other_rank(config, linear.name) if lora else None,
    )


def _other_rank(config: Config, name: str) -> int | None:
    rank, _ = lora_shape(config, name)
    return None if rank == config.lora_rank else rank


def _why_high(
    linear: LinearMeta, recipe: str, precision: PrecisionConfig, meta: ModelMeta
) -> str | None:
    """The first reason to keep this linear out of FP8, or None."""
    if linear.kind in _KEPT_HIGH:
        return _KEPT_HIGH[linear.kind]
    for pattern, reason in meta.keep_high.items():
        if matches(linear.name, pattern):
            return reason
    for pattern in precision.exclude:
        if matches(linear.name, pattern):
            return f"precision.exclude={pattern}"
    if linear.layer is not None:
        if linear.layer < precision.first_layers_bf16:
            return f"precision.first_layers_bf16={precision.first_layers_bf16}"
        if linear.layer >= meta.num_layers - precision.last_layers_bf16:
            return f"precision.last_layers_bf16={precision.last_layers_bf16}"
    multiple = SHAPE_MULTIPLE[recipe]
    for side, size in (("in", linear.in_features), ("out", linear.out_features)):
        if size % multiple:
            return f"{side}_features {size} is no multiple of {multiple}, which {recipe} needs"
    return None


def why_high_head(wanted: str, granted: Granted, loss: LossPlan) -> str | None:
    """Why the head stays out of FP8, or None where it was asked for and can be had."""
    if wanted != "fp8":
        return HIGH_HEAD
    if granted.backend not in (None, "torch"):
        return f"an FP8 head runs in the torch backend's loss, and FP8 is run by {granted.backend}"
    if not loss.fused:
        return f"an FP8 head runs in the fused loss, which is not taken: {loss.reason}"
    return None


def with_head_fallback(granted: Granted, wanted: str, why_high: str | None) -> Granted:
    """Add that an FP8 head was asked for and can't be had, to FP8 that can."""
    if granted.recipe is None or wanted != "fp8" or why_high is None:
        return granted
    fallback = Fallback(
        asked="precision.head=fp8",
        given=granted.compute_dtype,
        reason=why_high,
        fix="set precision.head=bf16, or precision.backend=torch and train.fused_loss=auto",
    )
    return replace(granted, fallbacks=(*granted.fallbacks, fallback))


def without_empty_fp8(granted: Granted, layers: Sequence[LayerPlan]) -> Granted:
    """Turn FP8 that no linear takes into the fallback that it is."""
    if granted.recipe is None or any(layer.precision in FP8_RECIPES for layer in layers):
        return granted
    commonest = Counter(layer.reason for layer in layers).most_common(1)
    reason = "no linear takes FP8" + (f": {commonest[0][0]}" if commonest else "")
    fallback = Fallback(asked="fp8", given=granted.compute_dtype, reason=reason)
    return Granted(
        recipe=None,
        backend=None,
        compute_dtype=granted.compute_dtype,
        high_reason=reason,
        fallbacks=(*granted.fallbacks, fallback),
    )


def coverage_of(layers: Sequence[LayerPlan]) -> float:
    """The share of these linears' matmul FLOPs that is planned in FP8."""
    total = sum(layer.flops for layer in layers)
    fp8 = sum(layer.flops for layer in layers if layer.precision in FP8_RECIPES)
    return fp8 / total if total else 0.0

"""What in a configuration contradicts itself, the model or the hardware: errors of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.ladder import Granted
from swiftfp8.models.meta import ModelMeta
from swiftfp8.plan_types import FP8_RECIPES, LayerPlan, RecipeOptions

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config


def head_problems(config: Config, *, has_lora: bool) -> list[SwiftFP8Error]:
    """An FP8 head is frozen: it can neither be trained nor have LoRA."""
    if config.precision.head != "fp8" or not (config.tuner == "full" or has_lora):
        return []
    trained = "has LoRA (target_modules)" if has_lora else "is trained (tuner=full)"
    return [
        SwiftFP8Error(
            f"an FP8 head must be frozen, and here the head {trained}",
            where="precision.head=fp8",
            fix="set precision.head=bf16",
        )
    ]


def attention_problems(config: Config, device: str) -> list[SwiftFP8Error]:
    """An error where the asked attention has no backward pass on this device."""
    if device == "cuda" or config.attn_implementation in ("sdpa", "eager"):
        return []
    return [
        SwiftFP8Error(
            f"{config.attn_implementation} can be trained on a GPU only",
            where="attn_implementation",
            fix="set attn_implementation=sdpa",
        )
    ]


def length_problems(config: Config, meta: ModelMeta) -> list[SwiftFP8Error]:
    """An error where a row of `max_length` tokens has positions that the model can't embed."""
    positions = meta.max_position_embeddings
    if not meta.learned_positions or config.max_length <= positions:
        return []
    return [
        SwiftFP8Error(
            f"the model has a learned embedding for each of {positions} positions, and none for "
            f"more: rows of {config.max_length} tokens can't run",
            where="max_length",
            fix=f"set max_length={positions}",
        )
    ]


def strict_problems(config: Config, granted: Granted) -> list[SwiftFP8Error]:
    """Fallbacks as errors, where `precision.strict` allows none."""
    if not config.precision.strict:
        return []
    return [
        SwiftFP8Error(
            f"{f.asked} can't be had, {f.given} would be given: {f.reason}",
            where="precision.strict=true, which allows no fallback",
            fix=f.fix,
        )
        for f in granted.fallbacks
    ]


def coverage_problems(
    config: Config, granted: Granted, layers: Sequence[LayerPlan], coverage: float
) -> list[SwiftFP8Error]:
    """An error where the plan already falls short of `precision.min_coverage`."""
    wanted = config.precision.min_coverage
    if config.dtype != "fp8" or coverage >= wanted:
        return []
    if granted.recipe is None:
        if config.precision.strict:  # already an error, with the same reason
            return []
        cost = granted.fallbacks[-1].reason
    else:
        total = sum(layer.flops for layer in layers)
        lost: Counter[tuple[str, str]] = Counter()
        for layer in layers:
            if layer.precision not in FP8_RECIPES:
                lost[layer.name.rpartition(".")[2], layer.reason] += layer.flops
        rows = [f"{n} {100 * f / total:.1f}% ({why})" for (n, why), f in lost.most_common(5)]
        cost = "in high precision stay " + ", ".join(rows)
    return [
        SwiftFP8Error(
            f"the plan runs {coverage:.1%} of matmul FLOPs in FP8, less than {wanted:.1%}: {cost}",
            where="precision.min_coverage",
            fix=f"set precision.min_coverage={int(coverage * 100) / 100}, or keep fewer layers out",
        )
    ]


def override_problems(
    config: Config, granted: Granted, recipe: RecipeOptions | None
) -> list[SwiftFP8Error]:
    """Errors where `precision.backward_override` can't be had."""
    if config.precision.backward_override is None or recipe is None:
        return []
    where, problems = "precision.backward_override", []
    if recipe.recipe == "fp8_delayed":
        fix = "leave it out, or take precision.recipe=fp8_current"
        problems.append(SwiftFP8Error("fp8_delayed has no backward_override", where=where, fix=fix))
    if granted.backend == "torch":
        fix = "leave it out, or take precision.backend=te"
        what = "the torch backend has no backward_override"
        problems.append(SwiftFP8Error(what, where=where, fix=fix))
    return problems

"""The options of the granted recipe, and notes on those that it does not take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftfp8.ladder import Granted
from swiftfp8.plan_types import RecipeOptions

if TYPE_CHECKING:
    from swiftfp8.config.schema import PrecisionConfig

# Tokens of a matmul must be a multiple: they are the summed dimension of a weight's gradient.
TOKEN_MULTIPLE = {"mxfp8": 32, "fp8_block": 128, "fp8_current": 16, "fp8_delayed": 16}


def recipe_options(
    precision: PrecisionConfig, granted: Granted
) -> tuple[RecipeOptions | None, list[str]]:
    """The recipe with its options, and notes on options that it does not take."""
    notes = []
    if precision.interval is not None:
        notes.append("precision.interval has no effect: Transformer Engine no longer has it")
    if granted.recipe is None:
        return None, notes
    fp8_format, split = precision.fp8_format, precision.split_accumulator
    if granted.recipe in ("mxfp8", "fp8_block"):
        if fp8_format == "hybrid":
            fp8_format = "e4m3"
            notes.append(f"{granted.recipe} uses e4m3 for gradients too: its scales are local")
        split = split or granted.recipe == "fp8_block"  # its matmul has no other accumulator
    default = RecipeOptions(recipe=granted.recipe)
    unused = [
        f"{name}={getattr(precision, name)}"
        for name in ("margin", "amax_history_len", "amax_compute_algo")
        if granted.recipe != "fp8_delayed" and getattr(precision, name) != getattr(default, name)
    ]
    if unused:
        notes.append(f"{', '.join(unused)}: without effect, only fp8_delayed keeps a history")
    options = RecipeOptions(
        recipe=granted.recipe,
        fp8_format=fp8_format,
        margin=precision.margin,
        amax_history_len=precision.amax_history_len,
        amax_compute_algo=precision.amax_compute_algo,
        split_accumulator=split,
        backward_override=precision.backward_override,
    )
    return options, notes

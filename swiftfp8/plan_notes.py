"""What a user should know of a plan besides its table: notes, in one sentence each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swiftfp8.engine import Engine
from swiftfp8.fusion import FusionPlan
from swiftfp8.hardware import GIB
from swiftfp8.ladder import Granted
from swiftfp8.memory import MemoryEstimate
from swiftfp8.models.meta import ModelMeta
from swiftfp8.plan_types import FP8_RECIPES, LayerPlan
from swiftfp8.tuning import ADAMW

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config


def engine_notes(engine: Engine, granted: Granted) -> list[str]:
    """Which engine `precision.backend=auto` took, where there was a choice."""
    if engine.reason is None or granted.backend != engine.name:
        return []
    return [f"precision.backend=auto took {engine.name}: {engine.reason}"]


def compile_notes(fusion: FusionPlan) -> list[str]:
    """What compiling layers costs before it pays."""
    if not fusion.compiled:
        return []
    return [
        "decoder layers are compiled: the first step takes half a minute or more, and so does the "
        "first with rows of another length; train.compile=false does without"
    ]


def head_notes(layers: Sequence[LayerPlan], heads: set[str], meta: ModelMeta) -> list[str]:
    """What an FP8 head costs where the embedding needs the same weight in high precision."""
    head = next((x for x in layers if x.name in heads and x.precision in FP8_RECIPES), None)
    if head is None or not meta.tied_head:
        return []
    return [
        "precision.head=fp8: the head's weight is the embedding's too, which stays in high "
        f"precision, so the FP8 copy takes {max(head.flops / GIB, 0.01):.2f} GiB more"
    ]


def score_notes(meta: ModelMeta) -> list[str]:
    """What the head of a classifier or reward model is, and that it is trained whole."""
    if meta.head is None:
        return []
    trained = ", ".join(meta.head_modules)
    return [meta.head.reason, f"new and trained whole, in FP32: {trained}"]


def length_notes(config: Config, meta: ModelMeta) -> list[str]:
    """Rows that are longer than any the model was trained on."""
    positions = meta.max_position_embeddings
    if not 0 < positions < config.max_length:
        return []
    return [
        f"max_length={config.max_length} is over the model's max_position_embeddings of "
        f"{positions}: longer rows have positions that it may never have seen"
    ]


def general_notes(config: Config, granted: Granted) -> list[str]:
    """Switches of precision during training, and options that do nothing."""
    notes = []
    if granted.recipe is not None and config.precision.start_step:
        notes.append(f"FP8 switches on at optimizer step {config.precision.start_step}")
    if granted.compute_dtype == "fp16":
        notes.append("FP16 trains with a loss scaler")
    if trains_bf16(config, granted) and not config.optim.master_weights:
        notes.append(
            "BF16 weights without FP32 masters: updates below half a BF16 step, most of them at a "
            "usual learning rate, are lost (optim.master_weights=false)"
        )
    masters = trains_bf16(config, granted) and config.optim.master_weights
    masters = masters and config.optim.name in ADAMW
    if config.optim.state_dtype != "fp32" and not masters:
        notes.append(
            f"optim.state_dtype={config.optim.state_dtype} has no effect: it is for BF16 weights "
            "that are trained on FP32 masters (tuner=full or freeze, AdamW)"
        )
    return notes


def memory_warnings(memory: MemoryEstimate, checkpointing: str) -> list[str]:
    """An estimate that is over the device's memory, and what would fit."""
    if memory.total <= memory.available:
        return []
    smaller = (
        f"per_device_train_batch_size={memory.largest_micro_batch} fits"
        if memory.largest_micro_batch
        else "not even one row fits"
    )
    more = "" if checkpointing == "full" else "; gradient_checkpointing=auto or full saves more"
    return [
        f"this run will probably end for lack of memory: the estimate of {memory.total:.1f} GiB is "
        f"over the {memory.available:.1f} GiB that can be used; {smaller}{more}"
    ]


def trains_bf16(config: Config, granted: Granted) -> bool:
    """Whether BF16 weights themselves are trained."""
    return config.tuner != "lora" and granted.compute_dtype == "bf16"

"""Every decision of a run, made once, printable, and with a reason that a user can read.

`build_plan(config, hardware, meta)` is pure: no weights, no device, no files. The stages after it
obey the plan and decide nothing. Its parts: plan_types.py holds the values, plan_layers.py decides
on each linear, plan_problems.py and plan_notes.py hold what is said.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swiftfp8.checkpointing import plan_checkpointing
from swiftfp8.engine import choose_engine
from swiftfp8.errors import SwiftFP8Error, raise_all
from swiftfp8.freezing import is_below, trained_modules
from swiftfp8.fusion import (
    DORA,
    FLEX,
    MIXED_LORA,
    FusionPlan,
    plan_fusion,
    why_not_fused,
    why_other_form,
)
from swiftfp8.hardware import Hardware
from swiftfp8.ladder import Fallback, climb
from swiftfp8.loss_plan import LossPlan, plan_loss
from swiftfp8.memory import MemoryEstimate, estimate_memory
from swiftfp8.models.meta import ModelMeta
from swiftfp8.plan_layers import (
    coverage_of,
    plan_layer,
    why_high_head,
    with_head_fallback,
    without_empty_fp8,
)
from swiftfp8.plan_notes import (
    compile_notes,
    engine_notes,
    general_notes,
    head_notes,
    length_notes,
    memory_warnings,
    score_notes,
    trains_bf16,
)
from swiftfp8.plan_problems import (
    attention_problems,
    coverage_problems,
    head_problems,
    length_problems,
    override_problems,
    strict_problems,
)
from swiftfp8.plan_recipe import TOKEN_MULTIPLE, recipe_options
from swiftfp8.plan_types import (
    FP8_RECIPES,
    HIGH_PRECISIONS,
    LayerPlan,
    LoraPlan,
    Plan,
    RecipeOptions,
)
from swiftfp8.selection import lora_targets, unmatched_excludes
from swiftfp8.speed import SLOWER, step_seconds
from swiftfp8.stream_plan import stream_notes, stream_problems
from swiftfp8.tasks import TASKS, speaks, task_notes, task_problems
from swiftfp8.threads import cpu_threads
from swiftfp8.tuning import (
    ADAMW,
    PATTERNS,
    accumulates,
    mixed_layers,
    saved_modules,
    tuning_notes,
    tuning_problems,
    warm_up_warning,
)

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

__all__ = [
    "FP8_RECIPES",
    "HIGH_PRECISIONS",
    "Fallback",
    "FusionPlan",
    "LayerPlan",
    "LoraPlan",
    "LossPlan",
    "MemoryEstimate",
    "Plan",
    "RecipeOptions",
    "build_plan",
]


def build_plan(config: Config, hardware: Hardware, meta: ModelMeta) -> Plan:
    """Decide precision, adapters and batch shape for every linear of `meta` on `hardware`.

    Under `precision.auto` FP8 gives way to BF16 where that is expected to be faster, and fits.

    Raises:
        SwiftFP8Error: for options that match nothing or contradict each other, for a fallback
            under `precision.strict`, and for a coverage under `precision.min_coverage`; all
            problems together.
    """
    asked = _plan_as_asked(config, hardware, meta)
    rows = config.per_device_train_batch_size * TASKS[config.task].sequences
    length = config.max_length
    fp8_s = step_seconds(asked, meta, micro_batch=rows, max_length=length)
    if asked.recipe is None or fp8_s is None:
        return asked
    high = _plan_as_asked(replace(config, dtype="bf16"), hardware, meta)
    high_s = step_seconds(high, meta, micro_batch=rows, max_length=length)
    if high_s is None or fp8_s < SLOWER * high_s:
        return asked
    slower = (
        f"a step in FP8 is expected to take {1e3 * fp8_s:.0f} ms and one in BF16 "
        f"{1e3 * high_s:.0f} ms, by a model of an H200: shapes this small are bound by launches"
    )
    if not config.precision.auto:
        return replace(asked, notes=(*asked.notes, f"{slower}; precision.auto=true takes BF16"))
    if asked.memory.total <= asked.memory.available < high.memory.total:
        return replace(asked, notes=(*asked.notes, f"{slower}, but BF16 would not fit"))
    reason = "precision.auto=true: see the note"
    layers = tuple(replace(layer, reason=reason) for layer in high.layers)
    notes = (f"precision.auto=true took BF16: {slower}", *high.notes)
    return replace(high, asked_dtype=config.dtype, layers=layers, notes=notes)


def _why_apart(config: Config) -> str | None:
    """Why no layer may be fused whatever the model, or None."""
    if config.use_dora:
        return DORA
    return FLEX if config.attn_implementation == "flex_attention" else None


def _why_slow_on_torch(config: Config, meta: ModelMeta, mixed: Collection[int]) -> str | None:
    """Why the torch engine would run the decoder layers linear by linear, or None."""
    if config.tuner == "full":
        return why_other_form(meta) if config.train.compile else "train.compile=false"
    reason = why_not_fused(meta, tuner=config.tuner, lora_dropout=config.lora_dropout)
    all_mixed = len(mixed) == meta.num_layers > 0
    return reason or _why_apart(config) or (MIXED_LORA if all_mixed else None)


def _plan_as_asked(config: Config, hardware: Hardware, meta: ModelMeta) -> Plan:
    targets: set[str] = set()
    target_problems: list[SwiftFP8Error] = []
    saved, saved_problems = saved_modules(config.modules_to_save, meta)
    if config.tuner == "lora":
        targets, target_problems = lora_targets(config.target_modules, meta)
        if "all-linear" in config.target_modules:
            targets -= saved
    trained, freeze_problems = trained_modules(config, meta)
    problems = [*target_problems, *saved_problems, *freeze_problems]
    problems += tuning_problems(config, targets, saved, meta, hardware.device)
    if any(problem.where in PATTERNS for problem in problems):
        raise_all(problems)  # what follows goes by them
    mixed = mixed_layers(config, targets, meta)
    engine = choose_engine(
        config.precision.backend,
        config.precision.recipe,
        hardware,
        full=config.tuner == "full",
        slow=_why_slow_on_torch(config, meta, mixed),
    )
    granted = climb(config.dtype, config.precision, hardware, engine.name)
    problems += unmatched_excludes(config.precision.exclude, meta)
    heads = {linear.name for linear in meta.linears if linear.kind == "head"}
    head_trained = bool(heads & (targets | saved | set(trained)))
    loss, loss_problems = plan_loss(
        config.train.fused_loss,
        meta,
        head_has_lora=bool(heads & (targets | saved)),
        wordless=None if speaks(config) else f"task={config.task} has no logits over words",
    )
    problems += loss_problems + head_problems(config, has_lora=head_trained)
    high_head = why_high_head(config.precision.head, granted, loss)
    granted = with_head_fallback(granted, config.precision.head, high_head)
    layers = tuple(
        plan_layer(
            linear,
            granted,
            config,
            meta,
            high_head,
            lora=linear.name in targets,
            saved=linear.name in saved,
            trained=config.tuner == "full" or is_below(linear.name, trained),
        )
        for linear in meta.linears
    )
    granted = without_empty_fp8(granted, layers)
    problems += length_problems(config, meta)
    problems += attention_problems(config, hardware.device)
    problems += task_problems(config)
    problems += stream_problems(config)
    coverage = coverage_of(layers)
    problems += strict_problems(config, granted)
    problems += coverage_problems(config, granted, layers, coverage)
    recipe, option_notes = recipe_options(config.precision, granted)
    problems += override_problems(config, granted, recipe)
    raise_all(problems)
    full_bf16 = trains_bf16(config, granted)
    adamw = config.optim.name in ADAMW
    master_weights = full_bf16 and adamw and config.optim.master_weights
    fusion = plan_fusion(
        layers,
        meta,
        backend=granted.backend,
        tuner=config.tuner,
        lora_dropout=config.lora_dropout,
        device=hardware.device,
        mixed=mixed,
        apart=_why_apart(config),
        compiles=config.train.compile,
        graphs=config.train.cuda_graphs,
    )
    estimate = partial(
        estimate_memory,
        _memory_meta(meta, config),
        hardware,
        layers,
        compute_dtype=granted.compute_dtype,
        backend=granted.backend,
        tuner=config.tuner,
        lora_rank=config.lora_rank,
        micro_batch=config.per_device_train_batch_size * TASKS[config.task].sequences,
        max_length=config.max_length,
        fused_layers=fusion.layers,
        attn_implementation=config.attn_implementation,
        packing=config.packing,
        master_weights=master_weights,
        state_dtype=config.optim.state_dtype,
        optimizer=config.optim.name,
        dora=config.use_dora,
        pissa=config.init_lora == "pissa",
        ema=config.train.ema_decay > 0,
        fused_loss=loss.fused,
        compiled=fusion.compiled,
        swiglu=fusion.swiglu,
        accumulates=accumulates(config),
    )
    checkpointing, checkpointing_reason, memory = plan_checkpointing(
        config.gradient_checkpointing,
        backend=granted.backend,
        recipe=granted.recipe,
        fused_layers=fusion.layers,
        estimate=lambda choice: estimate(checkpointing=choice),
    )
    rows = memory.largest_micro_batch // TASKS[config.task].sequences
    memory = replace(memory, largest_micro_batch=rows)
    outputs = {linear.name for linear in meta.linears if linear.kind in ("head", "score")}
    return Plan(
        model_name=meta.name,
        hardware_name=hardware.name,
        device=hardware.device,
        asked_dtype=config.dtype,
        compute_dtype=granted.compute_dtype,
        recipe=recipe,
        backend=granted.backend,
        layers=layers,
        lora=_lora_plan(config, layers, meta, saved),
        tuner=config.tuner,
        trained=trained,
        gradient_checkpointing=checkpointing,
        checkpointing_reason=checkpointing_reason,
        loss_scaler=granted.compute_dtype == "fp16",
        start_step=config.precision.start_step,
        fp8_token_multiple=TOKEN_MULTIPLE[recipe.recipe] if recipe else 1,
        min_coverage=config.precision.min_coverage if config.dtype == "fp8" else 0.0,
        coverage=coverage,
        loss=loss,
        fusion=fusion,
        decoder_coverage=coverage_of([layer for layer in layers if layer.name not in outputs]),
        master_weights=master_weights,
        state_dtype=config.optim.state_dtype if master_weights else "fp32",
        cpu_threads=cpu_threads(meta.total_params, hardware.device),
        memory=memory,
        fallbacks=granted.fallbacks,
        task=config.task,
        head=meta.head,
        head_modules=meta.head_modules,
        pooling=_pooling(config, meta),
        encoder=meta.encoder,
        notes=(
            *engine_notes(engine, granted),
            *granted.notes,
            *score_notes(meta),
            *task_notes(config),
            *stream_notes(config),
            *option_notes,
            *compile_notes(fusion),
            *tuning_notes(config, fp8=granted.recipe is not None, trains_bf16=full_bf16),
            *head_notes(layers, heads, meta),
            *length_notes(config, meta),
            *general_notes(config, granted),
        ),
        warnings=(*memory_warnings(memory, checkpointing), *_warm_up_warnings(config)),
    )


def _warm_up_warnings(config: Config) -> list[str]:
    """Where the number of steps is given; of epochs the rows tell it."""
    steps = config.max_steps
    said = warm_up_warning(config, steps, f"max_steps={steps}") if steps > 0 else None
    return [said] if said else []


def _lora_plan(
    config: Config, layers: tuple[LayerPlan, ...], meta: ModelMeta, saved: set[str]
) -> LoraPlan | None:
    if config.tuner != "lora":
        return None
    return LoraPlan(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        targets=tuple(layer.name for layer in layers if layer.lora),
        modules_to_save=(*meta.head_modules, *sorted(saved)),
        init=config.init_lora,
        use_dora=config.use_dora,
        plus_ratio=config.lora_plus_ratio,
        rank_pattern=tuple(config.rank_pattern.items()),
        alpha_pattern=tuple(config.alpha_pattern.items()),
        task_type=TASKS[config.task].adapter_type,
    )


def _memory_meta(meta: ModelMeta, config: Config) -> ModelMeta:
    """The shapes that the estimate goes by: a head of a few labels makes few logits."""
    if speaks(config):
        return meta
    return replace(meta, vocab_size=meta.head.num_labels if meta.head else 1)


def _pooling(config: Config, meta: ModelMeta) -> str | None:
    if config.task != "embedding":
        return None
    if config.embedding.pooling != "auto":
        return config.embedding.pooling
    return "mean" if meta.encoder else "last_token"

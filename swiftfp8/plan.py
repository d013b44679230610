"""Every decision of a run, made once, printable, and with a reason that a user can read.

`build_plan(config, hardware, meta)` is pure: no weights, no device, no files. The stages after it
obey the plan and decide nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from swiftfp8.checkpointing import plan_checkpointing
from swiftfp8.engine import Engine, choose_engine
from swiftfp8.errors import SwiftFP8Error, raise_all
from swiftfp8.fusion import NO_FUSION, FusionPlan, plan_fusion, why_not_fused
from swiftfp8.hardware import GIB, Hardware
from swiftfp8.ladder import Fallback, Granted, climb
from swiftfp8.loss_plan import PLAIN_LOSS, LossPlan, plan_loss
from swiftfp8.memory import MemoryEstimate, estimate_memory
from swiftfp8.models.meta import LinearMeta, ModelMeta
from swiftfp8.selection import lora_targets, matches, unmatched_excludes
from swiftfp8.speed import step_seconds
from swiftfp8.tasks import TASKS, Head, speaks, task_notes, task_problems

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config, PrecisionConfig

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

FP8_RECIPES = ("mxfp8", "fp8_block", "fp8_current", "fp8_delayed")
# Two threads were 5 times slower than one on 2.9e6 parameters, on two cores.
ONE_THREAD_PARAMS = 20_000_000
HIGH_PRECISIONS = ("bf16", "fp16", "fp32")
HIGH_HEAD = "output head: rounding it moves every token's probability"
_KEPT_HIGH = {
    "experts": "experts are one 3-D parameter, not a linear: no backend runs them in FP8 yet",
    "router": "router: rounding it sends tokens to other experts",
    "score": "score head: few outputs, all of which count, and trained from nothing",
    "pooler": "pooler: it sees one token a row, and the score reads it",
    "unused": "unused: the task reads the tokens themselves",
}
# In and out features of a weight must be multiples of this.
SHAPE_MULTIPLE = {"mxfp8": 32, "fp8_block": 128, "fp8_current": 16, "fp8_delayed": 16}
# So must the tokens of a matmul: they are the summed dimension of a weight's gradient.
TOKEN_MULTIPLE = {"mxfp8": 32, "fp8_block": 128, "fp8_current": 16, "fp8_delayed": 16}


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """An FP8 scaling recipe with its options, named as Transformer Engine names them."""

    recipe: str  # one of FP8_RECIPES
    fp8_format: str = "hybrid"  # "e4m3" or "hybrid"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    split_accumulator: bool = False
    backward_override: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What one linear gets. `name` is its full module path; shapes are (out, in) features."""

    name: str
    in_features: int
    out_features: int
    bias: bool
    precision: str  # a member of FP8_RECIPES or HIGH_PRECISIONS
    reason: str
    lora: bool
    trainable: bool  # the base weight itself is trained (tuner=full)
    count: int = 1  # matmuls of this shape that the name stands for

    @property
    def flops(self) -> int:
        """Multiply-adds per token: its weight in coverage."""
        return self.in_features * self.out_features * self.count


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """LoRA's shape. `targets` are full module names.

    `modules_to_save` are trained whole beside it; `task_type` is PEFT's.
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()
    task_type: str = "CAUSAL_LM"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the load, inject and train stages need to know.

    `compute_dtype` is what runs outside FP8: "bf16", "fp16" or "fp32". `recipe` and `backend`
    are None where nothing runs in FP8. `coverage` is the planned share of matmul FLOPs in FP8
    among all linears, the head and routers counted; `decoder_coverage` leaves the head out.
    """

    model_name: str
    hardware_name: str
    device: str
    asked_dtype: str
    compute_dtype: str
    recipe: RecipeOptions | None
    backend: str | None
    layers: tuple[LayerPlan, ...]
    lora: LoraPlan | None
    tuner: str
    gradient_checkpointing: str  # "none", "selective" or "full"
    loss_scaler: bool
    start_step: int
    fp8_token_multiple: int
    min_coverage: float
    coverage: float
    memory: MemoryEstimate
    checkpointing_reason: str = ""
    loss: LossPlan = PLAIN_LOSS
    fusion: FusionPlan = NO_FUSION
    decoder_coverage: float = 0.0
    master_weights: bool = False  # BF16 weights are trained on exact FP32 masters
    cpu_threads: int | None = None  # None leaves torch's choice
    task: str = "sft"
    head: Head | None = None  # of task=seq_cls and reward
    head_modules: tuple[str, ...] = ()  # top-level modules that are it
    pooling: str | None = None  # of task=embedding
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def weight_dtype(self) -> str:
        """What the weights are loaded in: FP32 masters where FP16 would train them all."""
        scaled = self.compute_dtype == "fp16" and self.tuner == "full"
        return "fp32" if scaled else self.compute_dtype


def build_plan(config: Config, hardware: Hardware, meta: ModelMeta) -> Plan:
    """Decide precision, adapters and batch shape for every linear of `meta` on `hardware`.

    Under `precision.auto` FP8 gives way to BF16 where that is expected to be faster, and fits.

    Raises:
        SwiftFP8Error: for options that match nothing or contradict each other, for a fallback
            under `precision.strict`, and for a coverage under `precision.min_coverage`; all
            problems together.
    """
    asked = _plan_as_asked(config, hardware, meta)
    rows, length = config.per_device_train_batch_size, config.max_length
    fp8_s = step_seconds(asked, meta, micro_batch=rows, max_length=length)
    if asked.recipe is None or fp8_s is None:
        return asked
    high = _plan_as_asked(replace(config, dtype="bf16"), hardware, meta)
    high_s = step_seconds(high, meta, micro_batch=rows, max_length=length)
    if high_s is None or fp8_s < high_s:
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


def _plan_as_asked(config: Config, hardware: Hardware, meta: ModelMeta) -> Plan:
    engine = choose_engine(
        config.precision.backend,
        config.precision.recipe,
        hardware,
        unfused=why_not_fused(meta, tuner=config.tuner, lora_dropout=config.lora_dropout),
    )
    granted = climb(config.dtype, config.precision, hardware, engine.name)
    problems = unmatched_excludes(config.precision.exclude, meta)
    targets: set[str] = set()
    if config.tuner == "lora":
        targets, target_problems = lora_targets(config.target_modules, meta)
        problems += target_problems
    heads = {linear.name for linear in meta.linears if linear.kind == "head"}
    loss, loss_problems = plan_loss(
        config.train.fused_loss, meta, head_has_lora=bool(heads & targets)
    )
    if not speaks(config):
        loss = LossPlan(fused=False, reason=f"task={config.task} has no logits over words")
    problems += loss_problems + _head_problems(config, has_lora=bool(heads & targets))
    why_high_head = _why_high_head(config.precision.head, granted, loss)
    granted = _with_head_fallback(granted, config.precision.head, why_high_head)
    layers = tuple(
        _plan_layer(linear, granted, config, meta, why_high_head, lora=linear.name in targets)
        for linear in meta.linears
    )
    granted = _without_empty_fp8(granted, layers)
    problems += _length_problems(config, meta)
    problems += task_problems(config)
    coverage = _coverage(layers)
    problems += _strict_problems(config, granted)
    problems += _coverage_problems(config, granted, layers, coverage)
    recipe, option_notes = _options(config.precision, granted)
    if recipe and recipe.recipe == "fp8_delayed" and recipe.backward_override:
        problems.append(
            SwiftFP8Error(
                "fp8_delayed has no backward_override",
                where="precision.backward_override",
                fix="leave it out, or take precision.recipe=fp8_current",
            )
        )
    if granted.backend == "torch" and config.precision.backward_override:
        problems.append(
            SwiftFP8Error(
                "the torch backend has no backward_override",
                where="precision.backward_override",
                fix="leave it out, or take precision.backend=te",
            )
        )
    raise_all(problems)
    master_weights = _trains_bf16(config, granted) and config.optim.master_weights
    fusion = plan_fusion(
        layers,
        meta,
        backend=granted.backend,
        tuner=config.tuner,
        lora_dropout=config.lora_dropout,
        device=hardware.device,
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
        fused_loss=loss.fused,
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
        lora=_lora_plan(config, layers, meta),
        tuner=config.tuner,
        gradient_checkpointing=checkpointing,
        checkpointing_reason=checkpointing_reason,
        loss_scaler=granted.compute_dtype == "fp16",
        start_step=config.precision.start_step,
        fp8_token_multiple=TOKEN_MULTIPLE[recipe.recipe] if recipe else 1,
        min_coverage=config.precision.min_coverage if config.dtype == "fp8" else 0.0,
        coverage=coverage,
        loss=loss,
        fusion=fusion,
        decoder_coverage=_coverage([layer for layer in layers if layer.name not in outputs]),
        master_weights=master_weights,
        cpu_threads=_cpu_threads(hardware, meta),
        memory=memory,
        fallbacks=granted.fallbacks,
        task=config.task,
        head=meta.head,
        head_modules=meta.head_modules,
        pooling=_pooling(config, meta),
        notes=(
            *_engine_notes(engine, granted),
            *granted.notes,
            *_score_notes(meta),
            *task_notes(config),
            *option_notes,
            *_head_notes(layers, heads, meta),
            *_length_notes(config, meta),
            *_notes(config, granted, memory, checkpointing),
        ),
    )


def _plan_layer(
    linear: LinearMeta,
    granted: Granted,
    config: Config,
    meta: ModelMeta,
    why_high_head: str | None,
    *,
    lora: bool,
) -> LayerPlan:
    if granted.recipe is None:
        high_reason: str | None = granted.high_reason
    elif linear.kind == "head" and why_high_head is not None:
        high_reason = why_high_head
    else:
        high_reason = _why_high(linear, granted.recipe, config.precision, meta)
    if high_reason is None:
        assert granted.recipe is not None
        precision = granted.recipe
        reason = f"features divide by {SHAPE_MULTIPLE[precision]}"
    else:
        precision, reason = granted.compute_dtype, high_reason
    return LayerPlan(
        name=linear.name,
        in_features=linear.in_features,
        out_features=linear.out_features,
        bias=linear.bias,
        precision=precision,
        reason=reason,
        lora=lora,
        trainable=config.tuner == "full" or linear.kind == "score",
        count=linear.count,
    )


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


def _why_high_head(wanted: str, granted: Granted, loss: LossPlan) -> str | None:
    """Why the head stays out of FP8, or None where it was asked for and can be had."""
    if wanted != "fp8":
        return HIGH_HEAD
    if granted.backend not in (None, "torch"):
        return f"an FP8 head runs in the torch backend's loss, and FP8 is run by {granted.backend}"
    if not loss.fused:
        return f"an FP8 head runs in the fused loss, which is not taken: {loss.reason}"
    return None


def _with_head_fallback(granted: Granted, wanted: str, why_high: str | None) -> Granted:
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


def _head_problems(config: Config, *, has_lora: bool) -> list[SwiftFP8Error]:
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


def _engine_notes(engine: Engine, granted: Granted) -> list[str]:
    if engine.reason is None or granted.backend != engine.name:
        return []
    return [f"precision.backend=auto took {engine.name}: {engine.reason}"]


def _head_notes(layers: tuple[LayerPlan, ...], heads: set[str], meta: ModelMeta) -> list[str]:
    """What an FP8 head costs where the embedding needs the same weight in high precision."""
    head = next((x for x in layers if x.name in heads and x.precision in FP8_RECIPES), None)
    if head is None or not meta.tied_head:
        return []
    return [
        "precision.head=fp8: the head's weight is the embedding's too, which stays in high "
        f"precision, so the FP8 copy takes {head.flops / GIB:.2f} GiB more"
    ]


def _without_empty_fp8(granted: Granted, layers: tuple[LayerPlan, ...]) -> Granted:
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


def _lora_plan(config: Config, layers: tuple[LayerPlan, ...], meta: ModelMeta) -> LoraPlan | None:
    if config.tuner != "lora":
        return None
    return LoraPlan(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        targets=tuple(layer.name for layer in layers if layer.lora),
        modules_to_save=meta.head_modules,
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


def _score_notes(meta: ModelMeta) -> list[str]:
    if meta.head is None:
        return []
    trained = ", ".join(meta.head_modules)
    return [meta.head.reason, f"new and trained whole, in high precision: {trained}"]


def _length_problems(config: Config, meta: ModelMeta) -> list[SwiftFP8Error]:
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


def _length_notes(config: Config, meta: ModelMeta) -> list[str]:
    positions = meta.max_position_embeddings
    if not 0 < positions < config.max_length:
        return []
    return [
        f"max_length={config.max_length} is over the model's max_position_embeddings of "
        f"{positions}: longer rows have positions that it may never have seen"
    ]


def _strict_problems(config: Config, granted: Granted) -> list[SwiftFP8Error]:
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


def _coverage(layers: tuple[LayerPlan, ...] | list[LayerPlan]) -> float:
    total = sum(layer.flops for layer in layers)
    fp8 = sum(layer.flops for layer in layers if layer.precision in FP8_RECIPES)
    return fp8 / total if total else 0.0


def _coverage_problems(
    config: Config, granted: Granted, layers: tuple[LayerPlan, ...], coverage: float
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


def _options(
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


def _cpu_threads(hardware: Hardware, meta: ModelMeta) -> int | None:
    """One thread for a model whose matmuls cost less than waking a second one."""
    small = hardware.device == "cpu" and meta.total_params < ONE_THREAD_PARAMS
    return 1 if small else None


def _trains_bf16(config: Config, granted: Granted) -> bool:
    return config.tuner == "full" and granted.compute_dtype == "bf16"


def _notes(
    config: Config, granted: Granted, memory: MemoryEstimate, checkpointing: str
) -> list[str]:
    notes = []
    if granted.recipe is not None and config.precision.start_step:
        notes.append(f"FP8 switches on at optimizer step {config.precision.start_step}")
    if granted.compute_dtype == "fp16":
        notes.append("FP16 trains with a loss scaler")
    if _trains_bf16(config, granted) and not config.optim.master_weights:
        notes.append(
            "BF16 weights without FP32 masters: updates below half a BF16 step, most of them at a "
            "usual learning rate, are lost (optim.master_weights=false)"
        )
    if memory.total > memory.available:
        smaller = (
            f"per_device_train_batch_size={memory.largest_micro_batch} fits"
            if memory.largest_micro_batch
            else "not even one row fits"
        )
        more = "" if checkpointing == "full" else "; gradient_checkpointing=auto or full saves more"
        notes.append(
            f"the estimate of {memory.total:.1f} GiB is over the {memory.available:.1f} GiB that "
            f"can be used: {smaller}{more}"
        )
    return notes

"""What is trained with which step: LoRA's shapes by pattern, the optimizer, the learning rate.

Patterns follow PEFT's rule, since PEFT reads them from the saved adapter: a regular expression
that fits the end of a module's name, at a dot; the first that fits counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.meta import ModelMeta
from swiftfp8.tasks import uses_reference

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

LORA_RATE, FULL_RATE = 1e-4, 1e-5
ADAMW = ("adamw_torch", "adamw_torch_fused")
PATTERNS = ("rank_pattern", "alpha_pattern")
_MUON_SINCE = (2, 9)


def pattern_value(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits the end of the module's name, or `default`."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def pick_learning_rate(config: Config, *, fp8: bool) -> float:
    """`learning_rate`, or what `auto` means for the tuner, scaled where FP8 runs."""
    if config.learning_rate is not None:
        return config.learning_rate
    base = LORA_RATE if config.tuner == "lora" else FULL_RATE
    return base * (config.optim.fp8_lr_scale if fp8 else 1.0)


def warm_up_steps(config: Config, steps: int) -> int:
    """How many of a run's first steps warm up; the first of them has learning rate 0."""
    constant = config.optim.lr_scheduler_type == "constant"
    return 0 if constant else math.ceil(config.warmup_ratio * steps)


def warm_up_warning(config: Config, steps: int, given: str) -> str | None:
    """What becomes of a run that ends before warm-up does; `given` says where `steps` come from."""
    warm = warm_up_steps(config, steps)
    if warm < steps or not warm:
        return None
    rate = f"the last at {(steps - 1) / warm:.0%} of learning_rate"
    became = "at learning rate 0: nothing is learnt" if steps == 1 else rate
    return (
        f"{given}, and all of that is warm-up (warmup_ratio={config.warmup_ratio:g}), {became}; "
        "train for more steps, or set warmup_ratio=0"
    )


def accumulates(config: Config) -> bool:
    """Whether a step may add up several micro-batches."""
    return config.gradient_accumulation_steps > 1 or config.train.tokens_per_step > 0


def tuning_notes(config: Config, *, fp8: bool, trains_bf16: bool) -> list[str]:
    """What `auto` became, and what an optimizer other than AdamW does without."""
    notes = []
    if config.learning_rate is None:
        scale = f", times optim.fp8_lr_scale={config.optim.fp8_lr_scale:g} under FP8" if fp8 else ""
        rate = pick_learning_rate(config, fp8=fp8)
        notes.append(f"learning_rate=auto took {rate:g}: tuner={config.tuner}{scale}")
    if config.train.tokens_per_step:
        notes.append(
            f"train.tokens_per_step={config.train.tokens_per_step}: how many micro-batches of "
            f"{config.per_device_train_batch_size} rows that is, their lengths tell"
        )
    if trains_bf16 and config.optim.master_weights and config.optim.name not in ADAMW:
        notes.append(
            f"optim.name={config.optim.name} steps BF16 weights without FP32 masters, which are "
            "AdamW's: updates below half a BF16 step are lost; LoRA's adapters are FP32 anyway"
        )
    if config.train.ema_decay:
        notes.append(
            f"train.ema_decay={config.train.ema_decay:g}: evaluated, saved and exported is the "
            "average of the trained weights, an FP32 copy of them"
        )
    if config.init_lora == "pissa":
        notes.append(
            "init_lora=pissa: the base is what is left of each weight without its principal part; "
            "checkpoints hold the change against the base on disk, an adapter of twice the rank"
        )
    if config.optim.name == "muon":
        rest = "everything else" if config.tuner == "full" else "what is no matrix"
        notes.append(f"optim.name=muon steps matrices of layers; AdamW steps {rest}")
    return notes


def tuning_problems(
    config: Config, targets: set[str], saved: set[str], meta: ModelMeta, device: str
) -> list[SwiftFP8Error]:
    """What contradicts itself among the options of tuner and optimizer."""
    problems = [*_optimizer_problems(config, device), *_stopping_problems(config)]
    if config.train.tokens_per_step and config.gradient_accumulation_steps > 1:
        problems.append(
            SwiftFP8Error(
                "a step's size is given twice: train.tokens_per_step and "
                "gradient_accumulation_steps",
                where="train.tokens_per_step",
                fix="leave one of them out",
            )
        )
    if config.neftune_noise_alpha and config.task == "dpo":
        problems.append(
            SwiftFP8Error(
                "noise on embeddings would also reach the reference that preferences are held to",
                where="neftune_noise_alpha",
                fix="leave it out, or set task=sft",
            )
        )
    if config.tuner != "lora":
        return problems + _needless(config)
    problems += _pissa_problems(config, targets, meta)
    for key in PATTERNS:
        problems += _pattern_problems(key, getattr(config, key), targets)
    for name in sorted(targets & saved):
        problems.append(
            SwiftFP8Error(
                f"{name} can't both have LoRA and be trained whole",
                where="modules_to_save",
                fix="take it out of modules_to_save or out of target_modules",
            )
        )
    return problems


def saved_modules(names: Sequence[str], meta: ModelMeta) -> tuple[set[str], list[SwiftFP8Error]]:
    """Full names of the linears that `modules_to_save` trains whole, beside LoRA."""
    saved: set[str] = set()
    problems = []
    for wanted in names:
        found = [m for m in meta.linears if m.name == wanted or m.name.endswith(f".{wanted}")]
        fix = f"leave {wanted} out, or set tuner=full, which trains every weight"
        if not found:
            fix = f"name linears, such as {_some_linear(meta)}; tuner=full trains every weight"
            why = "is no linear of this model (embeddings and norms can't be trained beside LoRA)"
        elif any(m.kind == "experts" for m in found):
            why = "is the 3-D parameter of all experts, no module"
        elif meta.tied_head and any(m.kind == "head" for m in found):
            why = "shares its weight with the embedding, which would be left behind"
        else:
            saved |= {m.name for m in found}
            continue
        what = f"modules_to_save: '{wanted}' {why}"
        problems.append(SwiftFP8Error(what, where="modules_to_save", fix=fix))
    return saved, problems


def _some_linear(meta: ModelMeta) -> str:
    """One that `modules_to_save` takes."""
    taken = [m for m in meta.linears if m.kind != "experts"]
    heads = [m for m in taken if m.kind == "head" and not meta.tied_head]
    return (heads or [m for m in taken if m.kind != "head"] or taken)[0].name


def mixed_layers(config: Config, targets: set[str], meta: ModelMeta) -> set[int]:
    """Decoder layers in which linears that read one input differ in rank or alpha."""
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    shapes: dict[tuple[int, int], set[tuple[int, float]]] = {}
    for linear in meta.linears:
        last = linear.name.rpartition(".")[2]
        place = next((i for i, group in enumerate(groups) if last in group), None)
        if linear.layer is None or place is None or linear.name not in targets:
            continue
        shapes.setdefault((linear.layer, place), set()).add(lora_shape(config, linear.name))
    return {layer for (layer, _), found in shapes.items() if len(found) > 1}


def lora_shape(config: Config, name: str) -> tuple[int, float]:
    """Rank and alpha of the linear of that name."""
    rank = pattern_value(config.rank_pattern, name, config.lora_rank)
    return int(rank), float(pattern_value(config.alpha_pattern, name, config.lora_alpha))


def _pattern_problems(
    key: str, patterns: Mapping[str, Any], targets: set[str]
) -> list[SwiftFP8Error]:
    problems = []
    for pattern in patterns:
        try:
            fits = any(pattern_value({pattern: True}, name, False) for name in targets)
            what = None if fits else f"{key}: '{pattern}' fits no linear that has LoRA"
        except re.error as error:
            what = f"{key}: '{pattern}' is no regular expression: {error}"
        if what is not None:
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in targets}))
            fix = f"give the end of a name, such as q_proj or layers.0.self_attn.q_proj ({ends})"
            problems.append(SwiftFP8Error(what, where=key, fix=fix))
    return problems


def _pissa_problems(config: Config, targets: set[str], meta: ModelMeta) -> list[SwiftFP8Error]:
    if config.init_lora != "pissa":
        return []
    what = []
    if config.use_dora:
        what.append(("DoRA measures the rows of a base that PiSSA takes apart", "use_dora=false"))
    if uses_reference(config):
        why = "the reference is the model with its adapter off, which PiSSA leaves incomplete"
        what.append((why, "init_lora=default, or rlhf.loss_type=orpo or simpo"))
    sizes = [m for m in meta.linears if m.name in targets]
    small = [m for m in sizes if lora_shape(config, m.name)[0] > min(m.in_features, m.out_features)]
    if small:
        why = f"{small[0].name} has fewer directions than its LoRA rank"
        what.append((why, f"a rank of at most {min(small[0].in_features, small[0].out_features)}"))
    return [
        SwiftFP8Error(why, where="init_lora=pissa", fix=f"set {instead}") for why, instead in what
    ]


def _needless(config: Config) -> list[SwiftFP8Error]:
    """LoRA's options where there is no LoRA."""
    given = {
        "rank_pattern": bool(config.rank_pattern),
        "alpha_pattern": bool(config.alpha_pattern),
        "modules_to_save": bool(config.modules_to_save),
        "use_dora": config.use_dora,
        "init_lora": config.init_lora != "default",
        "lora_plus_ratio": config.lora_plus_ratio != 1.0,
    }
    return [
        SwiftFP8Error(f"{key} is for LoRA", where=f"tuner={config.tuner}", fix="set tuner=lora")
        for key, there in given.items()
        if there
    ]


def _optimizer_problems(config: Config, device: str) -> list[SwiftFP8Error]:
    name = config.optim.name
    where = f"optim.name={name}"
    instead = "set optim.name=adamw_torch (or adafactor, whose states are smaller still)"
    if name == "adamw_8bit" and device != "cuda":
        return [SwiftFP8Error("8-bit AdamW needs a GPU", where=where, fix=instead)]
    if name == "adamw_8bit" and find_spec("bitsandbytes") is None:
        what = "8-bit AdamW is bitsandbytes', which is not installed"
        return [SwiftFP8Error(what, where=where, fix=f"pip install bitsandbytes, or {instead}")]
    if name == "muon":
        version = metadata.version("torch")
        if tuple(int(part) for part in version.split(".")[:2]) < _MUON_SINCE:
            what = f"torch {version} has no Muon, which came with 2.9"
            return [SwiftFP8Error(what, where=where, fix="pip install -U torch")]
    return []


def _stopping_problems(config: Config) -> list[SwiftFP8Error]:
    if not config.train.early_stopping_patience:
        return []
    data = config.data
    evaluates = bool(config.val_dataset) or config.split_dataset_ratio > 0 or data.eval_rows > 0
    rows = "data.eval_rows" if data.streaming else "split_dataset_ratio"
    if evaluates and config.train.eval_steps:
        return []
    return [
        SwiftFP8Error(
            "early stopping goes by evaluations, and "
            + ("there are only those at the end" if evaluates else "there are no rows for any"),
            where="train.early_stopping_patience",
            fix="set train.eval_steps" if evaluates else f"set val_dataset or {rows}",
        )
    ]

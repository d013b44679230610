"""What each training task is made of, as data that every stage reads. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from swiftfp8.errors import SwiftFP8Error

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

TASK_FILE = "swiftfp8_task.json"  # beside the weights of a checkpoint and of an export
WITHOUT_REFERENCE = ("orpo", "simpo")  # losses of task=dpo that compare with no other model
# Options of `rlhf` that a single loss of `task=dpo` reads.
_READ_BY = {
    "label_smoothing": "simpo",
    "simpo_gamma": "simpo",
    "cpo_alpha": "simpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
}
_OF_REWARD = "center_rewards_coefficient"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One value of `task`.

    `model_class` is transformers' auto class; `adapter_type` PEFT's task type; `formats` are the
    row formats that it reads; `sequences` of one row are in memory at once; `packs`: rows may
    share a sequence.
    """

    name: str
    model_class: str = "AutoModelForCausalLM"
    adapter_type: str = "CAUSAL_LM"
    formats: tuple[str, ...] = ()
    sequences: int = 1
    packs: bool = False
    what: str = "a causal language model"


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the model is to put out: `num_labels` numbers, and what they mean.

    `labels` are their names, in order; `problem_type` is transformers' name, None for a reward.
    `reason` says where all that was found.
    """

    num_labels: int
    problem_type: str | None
    labels: tuple[str, ...]
    reason: str


_CLASSIFIER = {
    "model_class": "AutoModelForSequenceClassification",
    "adapter_type": "SEQ_CLS",
    "what": "a model with a sequence classification class",
}
_CHAT = ("messages", "sharegpt", "alpaca", "text")
TASKS = {
    task.name: task
    for task in (
        Task(name="sft", formats=_CHAT, packs=True),
        Task(name="pretrain", formats=_CHAT, packs=True),
        Task(name="seq_cls", formats=("label",), **_CLASSIFIER),
        Task(name="dpo", formats=("preference",), sequences=2),
        Task(name="reward", formats=("preference",), sequences=2, **_CLASSIFIER),
        Task(
            name="embedding",
            formats=("embedding",),
            model_class="AutoModel",
            adapter_type="FEATURE_EXTRACTION",
            sequences=2,
            what="a text model",
        ),
    )
}
REWARD_HEAD = Head(
    num_labels=1, problem_type=None, labels=("reward",), reason="one score for each answer"
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a checkpoint or an export is for, as its `swiftfp8_task.json` says."""

    task: str
    head: Head | None
    pooling: str | None
    pad_token_id: int | None = None


def read_task_file(folder: Path) -> Trained | None:
    """What `folder` is for; None where it is a language model or nothing is said."""
    path = folder / TASK_FILE
    if not path.is_file():
        return None
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        head = said["head"]
        if head is not None:
            head = Head(**{**head, "labels": tuple(head["labels"])})
        return Trained(
            task=TASKS[said["task"]].name,
            head=head,
            pooling=said["pooling"],
            pad_token_id=said["pad_token_id"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SwiftFP8Error(
            f"{TASK_FILE} can't be read: {error}",
            where=str(path),
            fix="copy it again from the run's checkpoint",
        ) from error


def formats_of(config: Config) -> tuple[str, ...]:
    """Names of the row formats that the configured task reads, the likeliest first."""
    if rates_answers(config):
        return ("kto", "preference")
    return TASKS[config.task].formats


def speaks(config: Config) -> bool:
    """Whether the model puts out words: it has a head over the vocabulary."""
    return TASKS[config.task].adapter_type == "CAUSAL_LM"


def rates_answers(config: Config) -> bool:
    """Whether rows hold one answer with a thumb up or down each."""
    return config.task == "dpo" and config.rlhf.loss_type == "kto"


def uses_reference(config: Config) -> bool:
    """Whether the loss compares the model with what it was before training."""
    return config.task == "dpo" and config.rlhf.loss_type not in WITHOUT_REFERENCE


def _unread_options(config: Config) -> list[SwiftFP8Error]:
    """Options of another task or preference loss, which would change nothing without a word."""
    asked, usual = config.rlhf, type(config.rlhf)()
    set_ones = [f.name for f in fields(asked) if getattr(asked, f.name) != getattr(usual, f.name)]
    reader = {name: "reward" if name == _OF_REWARD else "dpo" for name in set_ones}
    others = [name for name in set_ones if reader[name] != config.task]
    if others:
        return [
            unread_rlhf(config.task, name, getattr(asked, name), reader[name]) for name in others
        ]
    return [
        SwiftFP8Error(
            f"rlhf.{name} is read by rlhf.loss_type={loss} alone, not by {asked.loss_type}",
            where=f"rlhf.{name}={getattr(asked, name):g}",
            fix=f"leave it out, or set rlhf.loss_type={loss}",
        )
        for name, loss in _READ_BY.items()
        if loss != asked.loss_type and name in set_ones
    ]


def unread_rlhf(task: str, name: str, value: object, reader: str = "dpo") -> SwiftFP8Error:
    """An option of `rlhf` that the task does not read; `reader` is the one that does."""
    return SwiftFP8Error(
        f"rlhf.{name} is read by task={reader}, and this is task={task}",
        where=f"rlhf.{name}={str(value).lower()}",
        fix=f"set task={reader}, or leave it out (task={task} rlhf=sigmoid undoes what a recipe "
        "sets)",
    )


def task_problems(config: Config) -> list[SwiftFP8Error]:
    """Combinations that can't work, each with the way out."""
    task, problems = TASKS[config.task], []
    if config.packing and not task.packs:
        problems.append(
            SwiftFP8Error(
                f"task={task.name} reads each row as a whole: rows can't be packed",
                where="packing",
                fix="set packing=false",
            )
        )
    for name, usual in (("truncation", ("right", "delete")), ("loss_scale", ("default",))):
        value = getattr(config.data, name)
        if not task.packs and value not in usual:
            problems.append(
                SwiftFP8Error(
                    f"data.{name}={value} is for conversations and text that are learned as such, "
                    f"not for the rows of task={task.name}",
                    where=f"data.{name}",
                    fix=f"set data.{name}={' or '.join(usual)}",
                )
            )
    problems += _weight_problems(config)
    if uses_reference(config) and config.tuner != "lora" and not config.rlhf.precompute_ref:
        problems.append(
            SwiftFP8Error(
                f"rlhf.loss_type={config.rlhf.loss_type} compares with the model before training, "
                f"which tuner={config.tuner} changes",
                where="rlhf.precompute_ref",
                fix="set rlhf.precompute_ref=true, or tuner=lora, whose base stays as it was",
            )
        )
    if config.task == "dpo" and config.precision.head == "fp8":
        problems.append(
            SwiftFP8Error(
                "an FP8 head runs in the loss of task=sft and pretrain alone",
                where="precision.head=fp8",
                fix="set precision.head=bf16",
            )
        )
    problems += _unread_options(config)
    unused = [name for name in ("num_labels", "problem_type") if getattr(config, name) is not None]
    if unused and config.task != "seq_cls":
        problems.append(
            SwiftFP8Error(
                f"task={config.task} has no labels of its own: {', '.join(unused)} says nothing",
                where=unused[0],
                fix="leave it out, or set task=seq_cls",
            )
        )
    return problems


def _weight_problems(config: Config) -> list[SwiftFP8Error]:
    """Weights that would weigh nothing."""
    weights, task = config.data.loss_weights, TASKS[config.task]
    if weights and not task.packs:
        return [
            SwiftFP8Error(
                f"data.loss_weights weigh tokens, and the loss of task={task.name} is over rows",
                where="data.loss_weights",
                fix="leave them out",
            )
        ]
    if "prompt" in weights and config.task != "pretrain" and config.data.loss_scale != "all":
        return [
            SwiftFP8Error(
                "data.loss_weights.prompt weighs what is said to the model, which is not trained",
                where="data.loss_weights.prompt",
                fix="leave it out, or train every token with data.loss_scale=all",
            )
        ]
    return []


def task_notes(config: Config) -> list[str]:
    """What a user of the task should know, and may not have meant."""
    notes = []
    accumulates = config.gradient_accumulation_steps > 1 or config.train.tokens_per_step > 0
    if weights := config.data.loss_weights:
        said = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        notes.append(
            f"tokens are weighed ({said}), and the loss is the mean by weight: it doesn't compare "
            "with that of a run without data.loss_weights"
        )
    if rates_answers(config) and config.per_device_train_batch_size == 1:
        notes.append(
            "kto estimates how far the model moved from one row at a time: a larger "
            "per_device_train_batch_size steadies it"
        )
    if config.task == "embedding" and accumulates:
        notes.append(
            "negatives are those of one micro-batch: gradient_accumulation_steps adds none"
        )
    if config.task == "dpo" and not uses_reference(config) and config.rlhf.precompute_ref:
        notes.append(f"{config.rlhf.loss_type} has no reference: rlhf.precompute_ref does nothing")
    if uses_reference(config):
        where = "before training" if config.rlhf.precompute_ref else "with its adapter off"
        notes.append(f"the reference is the model itself {where}: no second copy is held")
    return notes

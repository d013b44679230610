"""Small training jobs for tests: a tiny model, seeded rows, a plan by hand."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from model_kit import plan_for, tiny_llama
from rich.console import Console

from swiftfp8.config.schema import Config, TrainConfig
from swiftfp8.inject import inject_precision
from swiftfp8.plan import Plan, RecipeOptions
from swiftfp8.train.trainer import TrainResult, run_training

VOCAB = 256


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What the data stage hands over."""

    train: list[dict[str, list[int]]]
    eval: list[dict[str, list[int]]] | None
    collator: Any


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Right-pad to a multiple of 16, with masks and masked labels."""
    width = -(-max(len(row["input_ids"]) for row in rows) // 16) * 16
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        missing = width - len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [0] * missing)
        batch["attention_mask"].append([1] * len(row["input_ids"]) + [0] * missing)
        batch["labels"].append(row["labels"] + [-100] * missing)
    return {key: torch.tensor(value) for key, value in batch.items()}


def make_rows(count: int = 12, evaluation: int = 0, seed: int = 3) -> Rows:
    """Rows of different lengths that count upwards, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count + evaluation):
        start, length = torch.randint(5, 40, (2,), generator=generator).tolist()
        ids = [(start + i) % VOCAB for i in range(length)]
        rows.append({"input_ids": ids, "labels": [-100] * 2 + ids[2:]})
    return Rows(train=rows[:count], eval=rows[count:] or None, collator=pad)


def make_config(**options: Any) -> Config:
    """A short job: two rows a micro-batch, a line for every step, no pictures."""
    train = {"logging_steps": 1, "eval_steps": 0, "save_steps": 0, "images": False}
    train |= options.pop("train", {})
    base: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 2e-3}
    return Config(**{**base, **options}, train=TrainConfig(**train))


def make_model(
    tuner: str = "lora", *, fp8: bool = False, dropout: float = 0.0, **changes: Any
) -> tuple[Any, Plan]:
    """A tiny Llama, injected; `changes` replace fields of the plan."""
    model = tiny_llama(hidden=64)
    recipe = RecipeOptions(recipe="fp8_current") if fp8 else None
    plan = plan_for(
        model, recipe=recipe, backend="emulated" if fp8 else None, tuner=tuner, dropout=dropout
    )
    plan = replace(plan, **changes)
    torch.manual_seed(7)
    return inject_precision(model, plan, "cpu"), plan


def train(
    run_dir: Path,
    config: Config,
    *,
    rows: Rows | None = None,
    tuner: str = "lora",
    resume: Path | None = None,
    model: Any = None,
    **model_options: Any,
) -> tuple[TrainResult, str]:
    """Train a fresh model into `run_dir`; returns the result and what was shown."""
    run_dir.mkdir(parents=True, exist_ok=True)
    injected, plan = model or make_model(tuner, **model_options)
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    result = run_training(
        injected, None, rows or make_rows(), plan, config, run_dir, resume, console=console
    )
    return result, shown.getvalue()

"""What a model card says of the training: data, recipe, precision, by the run's own files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftfp8.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Each a line of text, None where nothing is known. Local paths are cut to their last part."""

    data: str | None = None
    recipe: str | None = None
    precision: str | None = None
    result: str | None = None


def read_run_facts(run_dir: Path, config: Config) -> RunFacts:
    """The facts of a run directory; files that it lacks leave theirs out."""
    return RunFacts(
        data=_data(config),
        recipe=_recipe(config),
        precision=_precision(_read(run_dir / "precision_report.json")),
        result=_result(_read(run_dir / "result.json")),
    )


def _data(config: Config) -> str | None:
    if not config.dataset:
        return None
    text = _names(config.dataset)
    if config.val_dataset:
        return f"{text}; evaluated on {_names(config.val_dataset)}"
    if config.split_dataset_ratio:
        return f"{text}; evaluated on {config.split_dataset_ratio:.0%} of it, set aside"
    return text


def _rate(config: Config) -> str:
    return "auto" if config.learning_rate is None else f"{config.learning_rate:g}"


def _recipe(config: Config) -> str:
    parts: list[str] = [config.task]
    if config.tuner == "lora":
        kind = "rsLoRA" if config.use_rslora else "LoRA"
        parts.append(f"{kind} r={config.lora_rank} alpha={config.lora_alpha:g}")
        parts.append(f"on {', '.join(config.target_modules)}")
    elif config.tuner == "freeze":
        chosen = [f"the last {config.freeze.last_layers} layers", *config.freeze.modules]
        parts.append(f"trained: {', '.join(chosen)}")
    else:
        parts.append("all weights trained")
    steps = config.per_device_train_batch_size * config.gradient_accumulation_steps
    length = f"{config.max_steps} steps" if config.max_steps > 0 else _epochs(config)
    parts += [
        length,
        f"{_step(config, steps)} of up to {config.max_length} tokens" + _packed(config),
        f"learning rate {_rate(config)} ({config.optim.lr_scheduler_type})",
        f"{config.optim.name}, seed {config.seed}",
    ]
    return ", ".join(parts)


def _step(config: Config, rows: int) -> str:
    tokens = config.train.tokens_per_step
    return f"about {tokens} tokens a step, rows" if tokens else f"{rows} rows a step"


def _precision(report: dict[str, Any]) -> str | None:
    """What the run computed in, with the share that was measured in FP8, or why there was none."""
    if not report:
        return None
    compute, recipe = report.get("compute_dtype"), report.get("recipe")
    if recipe:
        measured = report.get("measured") or {}
        share = measured.get("measured", report.get("planned_coverage", 0.0))
        word = "measured" if "measured" in measured else "planned"
        return (
            f"FP8 ({recipe.get('recipe')}, {report.get('backend')}) for {share:.1%} of the "
            f"linears' FLOPs ({word}), {compute} elsewhere"
        )
    reasons = [fallback.get("reason", "") for fallback in report.get("fallbacks", [])]
    return f"{compute}" + (f" ({report.get('asked_dtype')} asked: {reasons[0]})" if reasons else "")


def _result(result: dict[str, Any]) -> str | None:
    loss, evaluation = result.get("last_loss"), result.get("eval_loss")
    parts = [f"loss {loss:.4f}"] if loss is not None else []
    parts += [f"evaluation loss {evaluation:.4f}"] if evaluation is not None else []
    return f"{', '.join(parts)} after {result['steps']} steps" if parts else None


def _names(entries: Sequence[str]) -> str:
    return ", ".join(Path(entry).name if _is_local(entry) else entry for entry in entries)


def _is_local(entry: str) -> bool:
    """Paths are told by their last part; hub ids have one slash and no file behind them."""
    name = entry.partition("#")[0]
    return Path(name).exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _epochs(config: Config) -> str:
    return f"{config.num_train_epochs:g} epoch" + ("" if config.num_train_epochs == 1 else "s")


def _packed(config: Config) -> str:
    return ", packed" if config.packing else ""


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content

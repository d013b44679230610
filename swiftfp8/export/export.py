"""The export stage: merge, quantize, write, verify; and only then give the directory its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.architecture import require_fit
from swiftfp8.export.calibrate import Calibration, calibration_text
from swiftfp8.export.calibrate_stage import CalibrationRows, calibrated
from swiftfp8.export.card import write_report
from swiftfp8.export.checkpoint_io import parse_size
from swiftfp8.export.clock import Clock
from swiftfp8.export.fidelity import existing_texts, read_texts, text_windows
from swiftfp8.export.files import copy_companions, has_tokenizer, tokenizer_home, write_config
from swiftfp8.export.input_ranges import measure_ranges
from swiftfp8.export.journal import (
    JOURNAL_NAME,
    ExportJournal,
    find_unfinished,
    fingerprint,
    unfinished_hint,
)
from swiftfp8.export.judge_stage import call_judges, judge
from swiftfp8.export.layout import (
    ExportFormat,
    Fault,
    FormatOptions,
    LayerError,
    Layout,
    WriteJob,
)
from swiftfp8.export.report import ExportReport
from swiftfp8.export.room import why_no_room
from swiftfp8.export.run_facts import RunFacts
from swiftfp8.export.run_rows import RunRows
from swiftfp8.export.scheme import kv_scales
from swiftfp8.export.source import Source, open_source
from swiftfp8.export.staging import check_target, is_interruption, staged
from swiftfp8.export.stops import add_turn_ends
from swiftfp8.export.structure import TOKENIZER
from swiftfp8.export.survival import require_survival
from swiftfp8.export.targets import (
    format_warnings,
    pick_format,
    pick_static_format,
    require_kv_cache,
    require_loadable,
    require_static,
    why_no_reload,
)
from swiftfp8.export.task_base import copy_task_file
from swiftfp8.export.tp import SIZES, judge_tp, require_tp
from swiftfp8.export.verify import (
    ReadBack,
    ReloadCheck,
    require_sound,
    verify_directory,
    verify_read_back,
    verify_reload,
)
from swiftfp8.models.task_model import auto_class_of
from swiftfp8.registry import discover, unknown
from swiftfp8.tasks import read_task_file

# Options that decide the bytes of the weights; what they make of a model is compared as well.
_DECIDING = ("exclude", "max_shard_size", "calibrate")


@dataclass(frozen=True, kw_only=True)
class ExportContext:
    """What the stage is told beside the user's options.

    `base_name` and `adapter_name` are for the report; `keep` maps a family's name patterns to
    their reasons for staying in BF16; `device` is where the arithmetic runs; `calibration_rows`
    reads what `export.calibrate` needs, `run_rows` what the export is judged on; `run` is what the
    model card says of the training.
    """

    base_name: str | None = None
    adapter_name: str | None = None
    keep: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    trust_remote_code: bool = False
    calibration_rows: Callable[[], CalibrationRows] | None = None
    run_rows: Callable[[], RunRows] | None = None
    run: RunFacts | None = None
    console: Console = field(default_factory=Console)


def export_checkpoint(
    model_dir: Path,
    adapter_dir: Path | None,
    export_dir: Path,
    settings: ExportConfig,
    context: ExportContext | None = None,
) -> ExportReport:
    """Merge `adapter_dir` (or nothing) into `model_dir` and write `export_dir`, verified.

    Raises:
        SwiftFP8Error: files that are missing or do not fit, a target in use, no disk space.
        RunFailed: the verification found a fault; nothing is left behind.
    """
    context = context or ExportContext()
    clock = Clock()
    _refuse_overlap(export_dir, model_dir, adapter_dir)
    check_target(export_dir, overwrite=settings.overwrite)
    _require_format(settings)
    texts = existing_texts(settings.fidelity_dataset)
    max_shard_bytes = parse_size(settings.max_shard_size)
    judges = call_judges(settings, texts, context.run_rows)
    with clock.stage("open"):
        source = open_source(model_dir, adapter_dir, trust_remote_code=context.trust_remote_code)
        require_fit(source)
        export_format, options, layout, why = _describe(source, settings, context.keep)
    _require_speech(source, settings, export_format)
    if layout.config is not None:
        _try_companions(source, layout.config, adapter_dir, judges.texts, settings)
    if _needs_rows(export_format, settings):
        with clock.stage("measure"):
            options = _measured(source, layout, export_format, options, settings, context)
        layout = export_format.describe(source, options)
    with (
        calibrated(
            source,
            layout,
            settings,
            context.calibration_rows,
            device=context.device,
            console=context.console,
            clock=clock,
        ) as (layout, calibration),
        _begun(export_dir, source, layout, settings, calibration, context) as (partial, journal),
    ):
        with clock.stage("write"), _progress(source.nbytes, context.console) as advance:
            job = WriteJob(
                max_shard_bytes=max_shard_bytes,
                device=context.device,
                advance=advance,
                journal=journal,
            )
            errors = export_format.write(source, layout, partial, job)
        require_survival(errors, settings.min_survival)
        if layout.config is not None:
            write_config(source.layers.config, layout.config, partial)
        copy_companions(model_dir, adapter_dir, partial, model=layout.config is not None)
        copy_task_file(partial, adapter_dir, model_dir)
        if layout.config is not None and source.layers.speaks:
            add_turn_ends(partial, trust_remote_code=context.trust_remote_code)
        with clock.stage("check files"), context.console.status("verifying: files and bytes"):
            faults = verify_directory(
                partial, layout.format, trust_remote_code=context.trust_remote_code
            )
        warnings = require_sound(_as_source(faults, model_dir, adapter_dir))
        with clock.stage("read again"):
            reload, read_back = _read_again(
                source, layout, export_format, partial, settings, context
            )
        with clock.stage("judge"):
            judgement = judge(
                source,
                layout,
                export_format,
                partial,
                judges,
                settings,
                device=context.device,
                console=context.console,
            )
        report = _report(source, layout, partial, errors, context, export_dir=export_dir)
        report = replace(
            report,
            format_reason=why,
            reload=reload,
            read_back=read_back,
            judgement=judgement,
            calibration=calibration,
            warnings=(
                *format_warnings(layout.format, static=layout.input_amax is not None),
                *warnings,
                *judgement.warnings,
                *judgement.advice,
            ),
            reused=journal.reused,
            kv_scales=kv_scales(layout.kv_amax),
            tensor_parallel=tuple(judge_tp(source, layout, settings.tp or SIZES)),
            seconds=clock.seconds,
            stages=clock.stages,
        )
        write_report(report, partial)
        journal.close()
    return report


def merge_checkpoint(
    model_dir: Path,
    adapter_dir: Path | None,
    export_dir: Path,
    settings: ExportConfig,
    context: ExportContext | None = None,
) -> ExportReport:
    """`export_checkpoint` in BF16: the adapter merged, nothing quantized."""
    settings = replace(settings, format="bf16")
    return export_checkpoint(model_dir, adapter_dir, export_dir, settings, context)


def check_export(model_dir: Path, settings: ExportConfig, context: ExportContext) -> None:
    """Raise where a model, trained in full or with LoRA, could not be exported: headers decide."""
    _require_format(settings)
    source = open_source(model_dir, trust_remote_code=context.trust_remote_code)
    _describe(source, settings, context.keep)


def find_format(name: str) -> ExportFormat:
    """The module of `formats/` with this name."""
    formats = discover("swiftfp8.export.formats")
    if name not in formats:
        raise unknown("export format", name, formats, where="export.format")
    return formats[name]


def _require_format(settings: ExportConfig) -> None:
    if settings.format != "auto":
        find_format(settings.format)
        static = settings.activation_scheme == "static"
        require_loadable(settings.format, settings.target, static=static)


def _describe(
    source: Source, settings: ExportConfig, keep: Mapping[str, str]
) -> tuple[ExportFormat, FormatOptions, Layout, str]:
    """The format with its options, what it makes of every tensor, and why it was chosen."""
    options = FormatOptions(exclude=settings.exclude, keep=keep)
    name: str = settings.format
    why = "as asked"
    if settings.format == "auto" and settings.kv_cache:
        name, why = "compressed_tensors", "it has a place for the scales of export.kv_cache"
    elif settings.format == "auto" and settings.activation_scheme == "static":
        name, why = pick_static_format(settings.target)
    elif settings.format == "auto":
        name, why = pick_format(source, options, settings.target)
    export_format = find_format(name)
    require_static(name, settings.activation_scheme)
    if settings.kv_cache:
        require_kv_cache(
            name,
            settings.target,
            carries=getattr(export_format, "KV_CACHE", False),
            latent=bool(source.layers.config.get("kv_lora_rank")),
        )
    layout = export_format.describe(source, options)
    require_tp(source, layout, options, settings.tp)
    return export_format, options, layout, why


def _require_speech(source: Source, settings: ExportConfig, export_format: ExportFormat) -> None:
    """Refuse what only a language model can be measured by."""
    asked = {
        "export.calibrate=true": settings.calibrate,
        "export.kv_cache": settings.kv_cache is not None,
        "export.fidelity_dataset": bool(settings.fidelity_dataset),
        f"export.format={settings.format}": getattr(export_format, "STATIC_INPUTS", "") == "always",
        "export.activation_scheme": _is_static(export_format, settings),
    }
    for key, wanted in asked.items():
        if wanted and not source.layers.speaks:
            raise SwiftFP8Error(
                "it reads text as a language model does, and this is none",
                where=key,
                fix="leave it out; fp8_block and compressed_tensors need no text",
            )


def _try_companions(
    source: Source,
    config: Mapping[str, Any],
    adapter_dir: Path | None,
    texts: Sequence[Path],
    settings: ExportConfig,
) -> None:
    """Use what lies beside the weights as the export will, before anything is written."""
    trusted = source.trust_remote_code
    with TemporaryDirectory(prefix="swiftfp8-companions-") as folder:
        beside = Path(folder)
        copy_companions(source.directory, adapter_dir, beside)
        write_config(source.layers.config, config, beside)
        try:
            if source.layers.speaks:
                add_turn_ends(beside, trust_remote_code=trusted)
            if texts:
                tokens = settings.fidelity_tokens
                text_windows(read_texts(texts), tokens, beside, trust_remote_code=trusted)
        except SwiftFP8Error as error:
            home = tokenizer_home(source.directory, adapter_dir)
            place = str(home) if error.where == folder else error.where
            place = place and place.replace(folder, str(source.directory))
            raise SwiftFP8Error(error.what, where=place, fix=error.fix) from error


def _needs_rows(export_format: ExportFormat, settings: ExportConfig) -> bool:
    """Whether static scales have to be measured on text."""
    return _is_static(export_format, settings) or settings.kv_cache is not None


def _is_static(export_format: ExportFormat, settings: ExportConfig) -> bool:
    """Whether activations get static scales."""
    kind = getattr(export_format, "STATIC_INPUTS", "never")
    return kind == "always" or (kind == "optional" and settings.activation_scheme == "static")


def _measured(
    source: Source,
    layout: Layout,
    export_format: ExportFormat,
    options: FormatOptions,
    settings: ExportConfig,
    context: ExportContext,
) -> FormatOptions:
    """The options with what static scales are made of."""
    if context.calibration_rows is None:
        raise SwiftFP8Error(
            "a static scale needs rows, to measure how large activations get",
            where="export.calibration_dataset",
            fix="give a few hundred rows: export.calibration_dataset=[FILE] (a run has its own)",
        )
    with context.console.status("measuring how large activations get"):
        rows = context.calibration_rows()
        text = calibration_text(
            rows.rows, settings.calibration_tokens, seed=rows.seed, first_token=rows.first_token
        )
        found = measure_ranges(
            source,
            layout,
            text.windows_BT,
            inputs=_is_static(export_format, settings),
            keys_values=settings.kv_cache is not None,
            device=context.device,
        )
    return replace(options, input_amax=found.inputs, kv_amax=found.keys_values)


@contextmanager
def _begun(
    export_dir: Path,
    source: Source,
    layout: Layout,
    settings: ExportConfig,
    calibration: Calibration | None,
    context: ExportContext,
) -> Iterator[tuple[Path, ExportJournal]]:
    """The directory to write into with its journal: a new one, or what an earlier attempt left."""
    options = {"format": layout.format} | {name: getattr(settings, name) for name in _DECIDING}
    made_of = fingerprint(source, layout, options, calibration)
    unfinished = None
    if settings.resume:
        with context.console.status("reading what the interrupted export has finished"):
            unfinished, said = find_unfinished(export_dir, made_of)
        context.console.print(said, markup=False, highlight=False, soft_wrap=True)
    elif hint := unfinished_hint(export_dir):
        context.console.print(hint, markup=False, highlight=False, soft_wrap=True)
    with (
        unfinished.journal if unfinished else nullcontext(),  # locked until the end
        staged(
            export_dir,
            overwrite=settings.overwrite,
            needed_bytes=layout.nbytes - (unfinished.nbytes if unfinished else 0),
            adopt=unfinished.directory if unfinished else None,
            # Without its journal it is finished and about to get its name: nobody could resume it.
            keep=lambda error, partial: (
                settings.resume and is_interruption(error) and (partial / JOURNAL_NAME).exists()
            ),
        ) as partial,
        ExportJournal(partial, made_of, unfinished) as journal,
    ):
        try:
            yield partial, journal
        except BaseException as error:
            kept = (partial / JOURNAL_NAME).exists()
            if settings.resume and is_interruption(error) and kept:
                context.console.print("what is finished is kept: run the same command again")
            raise


def _as_source(faults: list[Fault], *inputs: Path | None) -> list[Fault]:
    """A tokenizer that the source does not have either is worth a warning, not a failure."""
    if any(path is not None and has_tokenizer(path) for path in inputs):
        return faults
    return [replace(f, severity="warning") if f.where == TOKENIZER else f for f in faults]


def _read_again(
    source: Source,
    layout: Layout,
    export_format: ExportFormat,
    partial: Path,
    settings: ExportConfig,
    context: ExportContext,
) -> tuple[ReloadCheck | None, ReadBack | None]:
    """Reload in a fresh process; where that can't be, read the files back ourselves."""
    if not settings.verify:
        return None, None
    obstacle = why_no_reload(layout.format) or why_no_room(source)
    if obstacle:
        with context.console.status("verifying: reading the files back"):
            return None, verify_read_back(source, layout, export_format, partial, obstacle)
    with context.console.status("verifying: reload in a fresh process"):
        return verify_reload(source, layout, export_format, partial), None


def _report(
    source: Source,
    layout: Layout,
    partial: Path,
    errors: tuple[LayerError, ...],
    context: ExportContext,
    *,
    export_dir: Path,
) -> ExportReport:
    adapter = source.checkpoint.adapter
    packages = ("swiftfp8", "torch", "transformers", "peft")
    return ExportReport(
        export_dir=export_dir,
        format=layout.format,
        format_reason="",
        base=context.base_name or source.directory.resolve().name,
        adapter=(context.adapter_name or adapter.directory.name) if adapter else None,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions={name: _version(name) for name in packages},
        source_bytes=source.nbytes,
        export_bytes=layout.nbytes,
        shards=len(list(partial.glob("*.safetensors"))),
        seconds=0.0,
        merged=sum(source.checkpoint.changed(name) for name in source.tensors),
        quantized=len(layout.quantized),
        kept={d.name: d.reason for d in layout.decisions if not d.quantize},
        layers=tuple(sorted(errors, key=lambda layer: -layer.relative_error)),
        reload=None,
        read_back=None,
        warnings=(),
        run=context.run,
        trained=read_task_file(partial),
        model_class=auto_class_of(source.layers.config.get("architectures")).__name__,
    )


def _refuse_overlap(export_dir: Path, *inputs: Path | None) -> None:
    """An export must not replace, nor hold, what it is made from."""
    target = export_dir.resolve()
    for path in inputs:
        if path is not None and target in (path.resolve(), *path.resolve().parents):
            raise SwiftFP8Error(
                "the export directory holds the model or adapter that it is made from",
                where=str(export_dir),
                fix="choose another export_dir",
            )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from source"


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("exporting", total=total)
        yield lambda count: progress.advance(task, count)

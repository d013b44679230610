"""The export stage: merge, quantize, write, verify; and only then give the directory its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

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
from swiftfp8.export.checkpoint_io import parse_size, shard_files
from swiftfp8.export.fidelity import Fidelity, measure_fidelity
from swiftfp8.export.files import copy_companions, write_config
from swiftfp8.export.layout import ExportFormat, FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.report import ExportReport, write_report
from swiftfp8.export.source import Source, open_source
from swiftfp8.export.staging import check_target, staged
from swiftfp8.export.verify import ReloadCheck, require_sound, verify_directory, verify_reload
from swiftfp8.registry import discover, unknown


@dataclass(frozen=True, kw_only=True)
class ExportContext:
    """What the stage is told beside the user's options.

    `base_name` and `adapter_name` are for the report; `keep` maps a family's name patterns to
    their reasons for staying in BF16; `device` is where the arithmetic runs.
    """

    base_name: str | None = None
    adapter_name: str | None = None
    keep: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    trust_remote_code: bool = False
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
    began = time.monotonic()
    check_target(export_dir, overwrite=settings.overwrite)
    _refuse_overlap(export_dir, model_dir, adapter_dir)
    export_format = find_format(settings.format)
    texts = _existing_files(settings.fidelity_dataset)
    max_shard_bytes = parse_size(settings.max_shard_size)
    source = open_source(model_dir, adapter_dir, trust_remote_code=context.trust_remote_code)
    options = FormatOptions(exclude=settings.exclude, keep=context.keep)
    layout = export_format.describe(source, options)
    with staged(export_dir, overwrite=settings.overwrite, needed_bytes=layout.nbytes) as partial:
        with _progress(source.nbytes, context.console) as advance:
            job = WriteJob(max_shard_bytes=max_shard_bytes, device=context.device, advance=advance)
            errors = export_format.write(source, layout, partial, job)
        write_config(source.layers.config, layout.config, partial)
        copy_companions(model_dir, adapter_dir, partial)
        warnings = require_sound(
            verify_directory(partial, layout.format, trust_remote_code=context.trust_remote_code)
        )
        reload, fidelity = _check(source, layout, export_format, partial, settings, context, texts)
        report = _report(
            source, layout, partial, errors, context, export_dir=export_dir, warnings=warnings
        )
        seconds = time.monotonic() - began
        report = replace(report, reload=reload, fidelity=fidelity, seconds=seconds)
        write_report(report, partial)
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


def find_format(name: str) -> ExportFormat:
    """The module of `formats/` with this name."""
    formats = discover("swiftfp8.export.formats")
    if name not in formats:
        raise unknown("export format", name, formats, where="export.format")
    return formats[name]


def _check(
    source: Source,
    layout: Layout,
    export_format: ExportFormat,
    partial: Path,
    settings: ExportConfig,
    context: ExportContext,
    texts: list[Path],
) -> tuple[ReloadCheck | None, Fidelity | None]:
    """Reload in a fresh process, and compare with the BF16 merge where text is given."""
    reload = fidelity = None
    if settings.verify:
        with context.console.status("verifying: reload in a fresh process"):
            reload = verify_reload(source, layout, export_format, partial)
    if texts and layout.quantized:
        with context.console.status("verifying: against the BF16 merge on held-out text"):
            fidelity = measure_fidelity(
                source,
                layout,
                export_format,
                files=texts,
                tokens=settings.fidelity_tokens,
                tokenizer_dir=partial,
                device=context.device,
            )
    return reload, fidelity


def _report(
    source: Source,
    layout: Layout,
    partial: Path,
    errors: tuple[LayerError, ...],
    context: ExportContext,
    *,
    export_dir: Path,
    warnings: tuple[str, ...],
) -> ExportReport:
    adapter = source.checkpoint.adapter
    packages = ("swiftfp8", "torch", "transformers", "peft")
    return ExportReport(
        export_dir=export_dir,
        format=layout.format,
        base=context.base_name or source.directory.resolve().name,
        adapter=(context.adapter_name or adapter.directory.name) if adapter else None,
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions={name: _version(name) for name in packages},
        source_bytes=source.nbytes,
        export_bytes=layout.nbytes,
        shards=len(shard_files(partial)),
        seconds=0.0,
        merged=sum(source.checkpoint.changed(name) for name in source.tensors),
        quantized=len(layout.quantized),
        kept={d.name: d.reason for d in layout.decisions if not d.quantize},
        layers=tuple(sorted(errors, key=lambda layer: -layer.relative_error)),
        reload=None,
        fidelity=None,
        warnings=warnings,
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


def _existing_files(names: tuple[str, ...] | list[str]) -> list[Path]:
    files = [Path(name) for name in names]
    for file in files:
        if not file.is_file():
            raise SwiftFP8Error("no such file", where=f"export.fidelity_dataset: {file}")
    return files


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

"""From what the user names (a run, a model, an adapter) to what the export stage reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from swiftfp8.config.compose import apply_overrides, read_resolved
from swiftfp8.config.model_names import looks_like_id
from swiftfp8.config.schema import Config, ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate_stage import read_calibration_rows
from swiftfp8.export.checkpoint_io import parse_size
from swiftfp8.export.export import ExportContext, check_export
from swiftfp8.export.fidelity import existing_texts
from swiftfp8.export.judge_stage import find_judge_engine
from swiftfp8.export.locate import locate_run
from swiftfp8.export.run_facts import read_run_facts
from swiftfp8.export.run_rows import read_run_rows
from swiftfp8.export.staging import check_target
from swiftfp8.requests import ExportRequest, SourceRequest

_BIT_FORMATS: dict[int, Literal["auto", "bf16"]] = {8: "auto", 16: "bf16"}


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """The arguments of `export_checkpoint`."""

    model_dir: Path
    adapter_dir: Path | None
    export_dir: Path
    settings: ExportConfig
    context: ExportContext


def resolve_request(
    request: ExportRequest, *, console: Console, default_name: str = "export"
) -> ExportJob:
    """Find the files that a request names, and its settings.

    Raises:
        SwiftFP8Error: not one source, a source that is not there, or no place to write to.
    """
    hub = "hf" if request.run else apply_overrides(Config(), request.overrides).hub
    model_dir, adapter_dir = locate(request, hub=hub)
    config = read_resolved(Path(request.run)) if request.run else Config()
    config = apply_overrides(_for_this(config, request, default_name), request.overrides)
    return ExportJob(
        model_dir=model_dir,
        adapter_dir=adapter_dir,
        export_dir=_target(request, config, default_name),
        settings=export_settings(config),
        context=ExportContext(
            base_name=_public_name(request.model or config.model, config.model_type, model_dir),
            adapter_name="/".join(adapter_dir.parts[-2:]) if adapter_dir else None,
            keep=_kept_by_family(model_dir),
            device=_fastest_device(),
            trust_remote_code=config.trust_remote_code,
            calibration_rows=partial(read_calibration_rows, config, model_dir, adapter_dir),
            run_rows=partial(read_run_rows, config, model_dir, adapter_dir),
            run=read_run_facts(Path(request.run), config) if request.run else None,
            console=console,
        ),
    )


def locate(request: SourceRequest, *, hub: str = "hf") -> tuple[Path, Path | None]:
    """(model directory, adapter directory or None) of a run, or of a model with its adapter.

    `request.model` is whatever `train` takes, fetched from `hub` if need be.

    Raises:
        SwiftFP8Error: neither or both of run and model, or files that are missing.
    """
    if (request.run is None) == (request.model is None):
        raise SwiftFP8Error(
            "give one of run= and model=",
            where="command line",
            fix="run=<run directory>, or model=<directory, hub id or registered name> with an "
            "optional adapter=<directory>",
        )
    if request.run is not None:
        if request.adapter is not None:
            raise SwiftFP8Error("adapter= goes with model=, a run has its own", where="adapter")
        return locate_run(Path(request.run), request.checkpoint)
    if request.checkpoint is not None:
        raise SwiftFP8Error("checkpoint= goes with run=", where="checkpoint")
    assert request.model is not None
    adapter_dir = _existing_adapter(request.adapter) if request.adapter is not None else None
    return _model_dir(request.model, hub), adapter_dir


def exports_after_training(config: Config) -> bool:
    """Whether `train` ends with an export."""
    return config.export_dir is not None or config.export_quantization_bit is not None


def check_export_after_training(config: Config) -> None:
    """Find out before training, not after it, what would keep the export from being written."""
    if exports_after_training(config):
        settings = export_settings(config)
        parse_size(settings.max_shard_size)
        existing_texts(settings.fidelity_dataset)
        if settings.engine_python is not None or settings.smoke == "require":
            find_judge_engine(settings)
        target = Path(config.export_dir) if config.export_dir else _own_export(config)
        if target is not None:
            check_target(target, overwrite=config.export.overwrite)


def _own_export(config: Config) -> Path | None:
    """Where a resumed run will write its export; a new run's directory is yet to be made."""
    if config.resume_from_checkpoint is None:
        return None
    given = Path(config.resume_from_checkpoint).resolve()
    runs = (run for run in (given, given.parent) if (run / "resolved.yaml").is_file())
    return next((run / "export" for run in runs), None)


def check_export_of_model(config: Config, model_dir: Path) -> None:
    """Find out before training, from headers alone, that the model can't be exported as asked."""
    if not exports_after_training(config):
        return
    settings = export_settings(config)
    if settings.format == "adapter" and config.tuner != "full":
        return  # the adapter that training writes
    context = ExportContext(
        keep=_kept_by_family(model_dir), trust_remote_code=config.trust_remote_code
    )
    check_export(model_dir, settings, context)


def export_settings(config: Config) -> ExportConfig:
    """`config.export` with files for registered names, and the format that a number of bits means.

    `export_quantization_bit` stands for a format where `export.format` names none.
    """
    texts = tuple(_file_of(name) for name in config.export.fidelity_dataset)
    settings: ExportConfig = replace(config.export, fidelity_dataset=texts)  # type: ignore[arg-type]
    if config.export_quantization_bit is None or settings.format != "auto":
        return settings
    return replace(settings, format=_BIT_FORMATS[config.export_quantization_bit])


def _for_this(config: Config, request: ExportRequest, default_name: str) -> Config:
    """A run's configuration without what this command was told otherwise.

    A format named now counts, whatever bits the run was to end with, and bits named now whatever
    its format was; and a merge does not go where the run's own export went.
    """
    told = {token.partition("=")[0].lstrip("+") for token in request.overrides}
    bits = apply_overrides(config, request.overrides).export_quantization_bit
    if told & {"export", "export.format"}:
        config = replace(config, export_quantization_bit=None)
    elif "export_quantization_bit" in told and bits is not None:
        config = replace(config, export=replace(config.export, format="auto"))
    return config if default_name == "export" else replace(config, export_dir=None)


def _file_of(name: str) -> str:
    """The file of a registered data set; other names are files already."""
    from swiftfp8.data.sources import local_path, registered_datasets

    registered = registered_datasets().get(name)
    path = local_path(registered) if registered else None
    return str(path) if path else name


def _public_name(model: str | None, model_type: str | None, model_dir: Path) -> str:
    """A hub id, or a registered, file's or directory's own name: a card tells no local path."""
    from swiftfp8.models.family import family_named
    from swiftfp8.models.source import is_registered

    named = model or model_type
    if named is None:
        return model_dir.name
    if model is None or is_registered(model):
        family = family_named(named)
        return family.default_model or family.name
    local = Path(named).expanduser().exists() or not looks_like_id(named)
    return Path(named).absolute().name if local else named


def _target(request: ExportRequest, config: Config, default_name: str) -> Path:
    if config.export_dir is not None:
        return Path(config.export_dir)
    if request.run is None:
        raise SwiftFP8Error(
            "no place to write to", where="export_dir", fix="add export_dir=<new directory>"
        )
    return Path(request.run) / default_name


def _model_dir(model: str, hub: str) -> Path:
    """A model directory as it was named; anything else that `train` takes is found or fetched."""
    from swiftfp8.models.source import resolve_source

    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    return resolve_source(Config(model=model, hub=hub)).path  # type: ignore[arg-type]


def _existing_adapter(path: str) -> Path:
    if not Path(path).is_dir():
        raise SwiftFP8Error(
            f"there is no directory {path}",
            where=f"adapter={path}",
            fix="give a run's checkpoint or an adapter's directory",
        )
    return Path(path)


def _kept_by_family(model_dir: Path) -> Mapping[str, str]:
    from swiftfp8.models.checkpoint import read_config_json
    from swiftfp8.models.family import family_of

    return family_of(read_config_json(model_dir)).keep_high


def _fastest_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

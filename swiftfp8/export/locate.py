"""Where a run keeps what is exported: its base model and its best or last checkpoint."""

from __future__ import annotations

from pathlib import Path

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import read_json
from swiftfp8.export.merge import ADAPTER_CONFIG
from swiftfp8.export.staging import REPORT_NAME
from swiftfp8.registry import suggest, suggest_path


def locate_run(run_dir: Path, checkpoint: str | None = None) -> tuple[Path, Path | None]:
    """(model_dir, adapter_dir) of a run: `checkpoint` by name, else `best`, else `last`.

    A LoRA checkpoint names its base in adapter_config.json; a full one is a model itself.

    Raises:
        SwiftFP8Error: no run, no checkpoint, or a base model that is gone.
    """
    if not run_dir.is_dir():
        raise SwiftFP8Error(
            "there is no such run directory",
            where=str(run_dir),
            fix="give the directory that `swiftfp8 train` printed",
        )
    directory = _checkpoint(run_dir, checkpoint)
    if (directory / ADAPTER_CONFIG).is_file():
        return _base_of(directory), directory
    if (directory / "config.json").is_file():
        return directory, None
    raise SwiftFP8Error(
        f"the checkpoint holds neither {ADAPTER_CONFIG} nor config.json", where=str(directory)
    )


def require_checkpoint(directory: Path) -> None:
    """Raise where `dir=directory` names no model and no adapter."""
    if not directory.is_dir():
        near = suggest_path(directory)
        fix = f"did you mean dir={near}?" if near else "give the directory of an export"
        raise SwiftFP8Error("there is no such directory", where=f"dir={directory}", fix=fix)
    if not any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise _no_checkpoint(directory)


def tokenizer_dir(model_dir: Path, adapter_dir: Path | None) -> Path:
    """The run's tokenizer, which may have a chat template that the base lacks; else the base's."""
    if adapter_dir and (adapter_dir / "tokenizer_config.json").is_file():
        return adapter_dir
    return model_dir


def _no_checkpoint(directory: Path) -> SwiftFP8Error:
    """A directory without a checkpoint: a run, whose export lies in it or is yet to be made?"""
    if (directory / "resolved.yaml").is_file():
        what = "this is a run directory, not a checkpoint"
        fix = f"export it first: swiftfp8 export run={directory}"
    else:
        what, fix = "the directory holds no checkpoint", "give the one that holds config.json"
    inside = sorted(file.parent for file in directory.glob("*/config.json"))
    exports = [folder for folder in inside if (folder / REPORT_NAME).is_file()] or inside
    if exports:
        fix = f"give what lies in it: dir={exports[0]}"
    return SwiftFP8Error(what, where=f"dir={directory}", fix=fix)


def _checkpoint(run_dir: Path, name: str | None) -> Path:
    if name is None:
        for link in ("best", "last"):
            if (run_dir / link).is_dir():
                return (run_dir / link).resolve()
        if (run_dir / ADAPTER_CONFIG).is_file():  # a checkpoint directory itself was given
            return run_dir
        raise SwiftFP8Error(
            "the run has no checkpoint yet",
            where=str(run_dir),
            fix="train further: `swiftfp8 train ... resume_from_checkpoint=<run directory>`"
            if (run_dir / "resolved.yaml").is_file()
            else "give the directory that `swiftfp8 train` printed",
        )
    if name in ("", ".", "..") or "/" in name:
        raise SwiftFP8Error(
            f"'{name}' is no name of a checkpoint within the run",
            where=f"checkpoint={name}",
            fix="give best, last or checkpoint-N; another run is named by run=<its directory>",
        )
    if not (run_dir / name).is_dir():
        known = sorted(p.name for p in run_dir.iterdir() if p.is_dir() and p.name != "images")
        close = suggest(name, known)
        raise SwiftFP8Error(
            f"the run has no checkpoint '{name}'",
            where=str(run_dir),
            fix=f"did you mean {close}?" if close else f"it has: {', '.join(known) or 'none'}",
        )
    return (run_dir / name).resolve()


def _base_of(adapter_dir: Path) -> Path:
    base = read_json(adapter_dir / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base or not (Path(base) / "config.json").is_file():
        raise SwiftFP8Error(
            f"the adapter's base model is not there: {base or 'none is named'}",
            where=str(adapter_dir / ADAPTER_CONFIG),
            fix="give it: model=<directory> adapter=<directory>",
        )
    return Path(base)

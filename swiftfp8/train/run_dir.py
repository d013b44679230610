"""The run directory: one folder that holds all a run was told, did and produced."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import swiftfp8
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.train.checkpoint import clean_leftovers, newest_checkpoint
from swiftfp8.train.run_place import choose_directory, empty_run, release_lock

RECORDS = "sessions"
_SECRET = re.compile(r"token|secret|password|passwd|api_?key|credential", re.IGNORECASE)
_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "transformer-engine",
    "datasets",
    "numpy",
)
_told: dict[Path, dict[str, str]] = {}  # files yet to be written, by directory


def start_run(
    composed: Any,
    source_name: str,
    *,
    plan: Mapping[str, Any] | None = None,
    precision_report: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> Path:
    """Create, or on a resume re-open, the run directory; lock it and write what the run was told.

    A resumed run's files are only touched by `confirm_run`, once its checkpoint is known to fit.

    Args:
        composed: a `Config`, or what `compose_config` returns (then its overrides are kept too).
        source_name: the model's short name, for the directory's name.
        plan: the plan as JSON-ready values, written to `plan.json`.
        precision_report: written to `precision_report.json`; the trainer adds what it measures.
        now: the time in the directory's name.

    Raises:
        SwiftFP8Error: the directory is in use, finished, or holds something else.
    """
    config = getattr(composed, "config", composed)
    run_dir = choose_directory(config, source_name, now or datetime.now())
    clean_leftovers(run_dir)
    overrides: Sequence[str] = getattr(composed, "overrides", ())
    # The only import of the configuration's code below it: YAML is its business, not ours.
    from swiftfp8.config.absolute import with_absolute_paths
    from swiftfp8.config.compose import to_yaml

    # A resume is how a session began, not what the run is.
    told_config = replace(with_absolute_paths(config), resume_from_checkpoint=None)
    told = {
        "resolved.yaml": to_yaml(told_config),
        "overrides.txt": "".join(f"{line}\n" for line in overrides),
        "environment.json": to_json(describe_environment(config.seed)),
    }
    if plan is not None:
        told["plan.json"] = to_json(plan)
    if precision_report is not None:
        told["precision_report.json"] = to_json(precision_report)
    _told[run_dir.resolve()] = told
    if not (run_dir / "resolved.yaml").exists():
        confirm_run(run_dir)
    return run_dir


def confirm_run(run_dir: Path) -> None:
    """Write what `start_run` left to be written; no error where there is nothing.

    A resume with the configuration and the plan that the run has leaves its records alone. Any
    other moves them to `sessions/N` first: what a run was told is never lost.
    """
    told = _told.pop(run_dir.resolve(), {})
    if (run_dir / "resolved.yaml").exists():
        if not _changes(run_dir, told):
            return
        _keep_records(run_dir, told)
    for name, text in told.items():
        write_text(run_dir / name, text)


def _changes(run_dir: Path, told: Mapping[str, str]) -> bool:
    """Whether the run has been told something else than what it is told now."""
    for name in ("resolved.yaml", "plan.json"):
        path = run_dir / name
        if name in told and (not path.is_file() or path.read_text(encoding="utf-8") != told[name]):
            return True
    return False


def _keep_records(run_dir: Path, names: Iterable[str]) -> None:
    """Copy the records of the session before to the first free `sessions/N`."""
    number = 1
    while (run_dir / RECORDS / str(number)).exists():
        number += 1
    folder = run_dir / RECORDS / str(number)
    try:
        folder.mkdir(parents=True)
        for name in names:
            if (run_dir / name).is_file():
                shutil.copy2(run_dir / name, folder / name)
    except OSError as error:
        raise SwiftFP8Error(
            f"could not keep the run's records: {error.strerror or error}",
            where=str(folder),
            fix="make room on the disk, or resume a copy of the checkpoint outside its run",
        ) from error


def release_run(run_dir: Path) -> None:
    """Give up this process's lock on `run_dir`; no error where it holds none."""
    _told.pop(run_dir.resolve(), None)
    release_lock(run_dir)


def discard_run(run_dir: Path) -> bool:
    """Remove a run directory in which nothing was trained; return whether it was removed.

    For a mistake found after `start_run` and before the first step, so that nothing half-written
    is left behind. A directory with a checkpoint, or in which training began (it has a log, if an
    empty one), is kept.
    """
    if newest_checkpoint(run_dir) is not None or (run_dir / "logging.jsonl").exists():
        return False
    release_run(run_dir)
    empty_run(run_dir, keep_lock=False)
    if any(run_dir.iterdir()):
        return False
    run_dir.rmdir()
    return True


def describe_environment(seed: int) -> dict[str, Any]:
    """Versions, devices, command line and seed; no environment variables and no secrets."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions: dict[str, str | None] = {
        "python": sys.version.split()[0],
        "swiftfp8": swiftfp8.__version__,
    }
    for package in _PACKAGES:
        versions[package] = _version(package)
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": _without_secrets(sys.argv),
        "seed": seed,
        "versions": versions,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "platform": sys.platform,
    }


def write_text(path: Path, text: str) -> None:
    """Write `path` whole or not at all."""
    part = path.with_name(f".tmp-{path.name}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SwiftFP8Error(
            f"could not write {path.name}: {error.strerror or error}",
            where=str(path.parent),
            fix="make room on the disk, or set output_dir to a folder that can be written",
        ) from error


def to_json(value: Any) -> str:
    """`value` as indented JSON."""
    return json.dumps(value, indent=2, default=str) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, to_json(value))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    """The NVIDIA kernel driver's version, as the kernel module reports it."""
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(errors="replace"))
    return found.group(1) if found else None


def _without_secrets(arguments: Sequence[str]) -> str:
    """The command line with the values of keys that look secret blanked."""
    shown = []
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        shown.append(f"{key}=***" if equals and _SECRET.search(key) else argument)
    return shlex.join(shown)

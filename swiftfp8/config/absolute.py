"""Relative paths made absolute: what a run was told must mean the same from any folder."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftfp8.config.paths import configs_dir, yaml_names
from swiftfp8.config.schema import Config


def with_absolute_paths(config: Config) -> Config:
    """`config` with the local files that it names, and the folders it writes to, made absolute.

    Hub ids, registered names and files that are not there stay as they are.
    """
    export: dict[str, Any] = {
        key: _entries(getattr(config.export, key))
        for key in ("fidelity_dataset", "calibration_dataset")
    }
    changed: dict[str, Any] = {
        "model": _existing(config.model),
        "template": _existing(config.template),
        "dataset": _entries(config.dataset),
        "val_dataset": _entries(config.val_dataset),
        "output_dir": os.path.abspath(config.output_dir),
        "export_dir": os.path.abspath(config.export_dir) if config.export_dir else None,
        "export": replace(
            config.export, engine_python=_existing(config.export.engine_python), **export
        ),
    }
    return replace(config, **changed)


def _existing(path: str | None) -> str | None:
    """The symlinks of a path stay: those of a virtual environment's Python matter."""
    return os.path.abspath(path) if path and Path(path).exists() else path


def _entries(entries: Any) -> tuple[str, ...]:
    """Data sets, with the `#N` that samples them."""
    registered = yaml_names(configs_dir() / "dataset")
    parts = [re.split(r"(?=#\d+$)", entry) for entry in entries]
    return tuple(
        "".join([name if name in registered else str(_existing(name)), *count])
        for name, *count in parts
    )

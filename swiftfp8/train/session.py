"""What the parts of the trainer work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftfp8.config.schema import Config
from swiftfp8.plan import Plan
from swiftfp8.train.metrics import Meter, RunLog
from swiftfp8.train.objectives import Objective
from swiftfp8.train.progress import Display
from swiftfp8.train.signals import StopRequest


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the trainer works with besides transformers' own arguments.

    `objective` is None for language modelling, whose loss is the model's own.
    """

    plan: Plan
    config: Config
    run_dir: Path
    tokenizer: Any
    fingerprint: dict[str, Any]
    meter: Meter
    log: RunLog
    display: Display
    stop: StopRequest
    objective: Objective | None = None
    job: dict[str, Any] = field(default_factory=dict)  # see train/changes.py

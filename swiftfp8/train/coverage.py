"""What share of the matmuls really ran in FP8, against what the plan promised."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from torch import nn

from swiftfp8 import inject
from swiftfp8.errors import RunFailed
from swiftfp8.plan import Plan
from swiftfp8.train.progress import Display
from swiftfp8.train.run_dir import write_json


def record_coverage(
    model: nn.Module, plan: Plan, run_dir: Path, step: int, display: Display
) -> None:
    """Measure coverage on the running modules and add it to `precision_report.json`.

    Raises:
        RunFailed: it is below `precision.min_coverage`.
    """
    report = inject.measure_coverage(model, plan)
    path = run_dir / "precision_report.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    content["measured"] = {"after_step": step, **asdict(report)}
    write_json(path, content)
    names = list(report.missing)
    shown = f"{names[0]} {report.missing[names[0]]}" if names else ""
    if report.measured < plan.min_coverage:
        raise RunFailed(
            f"only {report.measured:.1%} of the matmul FLOPs ran in FP8, less than "
            f"precision.min_coverage={plan.min_coverage}" + (f"; {shown}" if shown else ""),
            where=str(path),
            fix="see the reason of each layer in the report, or lower precision.min_coverage",
        )
    if names:
        display.note(
            f"WARNING: {len(names)} linears that were planned for FP8 did not always run in it, "
            f"such as {shown} ({path.name} has all)"
        )

"""What differs between the job that wrote a checkpoint and the one that goes on from it.

A run may go on in another precision, on other hardware or with other options: nothing that is
saved depends on them. It is then another course than the uninterrupted run's, so each difference
is said, and the way back is kept (`sessions/`, see run_dir.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from swiftfp8.config.schema import Config
from swiftfp8.plan import Plan

# Where a session is, and what began it: not what it does. Precision is told by the plan's facts.
_UNSAID = (
    "resume_from_checkpoint",
    "output_dir",
    "run_name",
    "dtype",
    "precision.recipe",
    "precision.backend",
    "precision.emulate",
)
_AFTER_TRAINING = ("export", "export_dir", "export_quantization_bit", "report_to")
_NEVER_SAID = "not recorded"


def describe_job(config: Config, plan: Plan) -> dict[str, Any]:
    """What a checkpoint's manifest says of the job, as JSON has it: see `changes`."""
    options = {key: value for key, value in _flat(asdict(config)) if key not in _UNSAID}
    precision = {
        "dtype": plan.asked_dtype,
        "compute_dtype": plan.compute_dtype,
        "recipe": plan.recipe.recipe if plan.recipe else "none",
        "backend": plan.backend or "none",
    }
    return {"precision": precision, "hardware": plan.hardware_name, "options": options}


def changes(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, list[str]]:
    """Differences as `key old -> new`, by `precision`, `hardware` and `options`; empty: none.

    `then` is None for checkpoints of old, which say nothing of their job.
    """
    if then is None:
        return {}
    found = {
        "precision": _different(then["precision"], now["precision"]),
        "hardware": _different({"device": then["hardware"]}, {"device": now["hardware"]}),
        "options": _different(then["options"], now["options"]),
    }
    return {kind: lines for kind, lines in found.items() if lines}


def changes_training(found: Mapping[str, list[str]]) -> bool:
    """Whether anything but the export and where numbers are reported to is another."""
    options = [line.partition(" ")[0] for line in found.get("options", ())]
    later = [name for name in options if name.partition(".")[0] in _AFTER_TRAINING]
    return "precision" in found or len(options) > len(later)


def _different(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {_shown(then.get(key, _NEVER_SAID))} -> {_shown(now[key])}"
        for key in now
        if key not in then or then[key] != now[key]
    ]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; tuples become the lists that JSON reads back."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, list(value) if isinstance(value, tuple) else value

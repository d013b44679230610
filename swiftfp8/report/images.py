"""Pictures of a run from `logging.jsonl` alone: loss, metrics, learning rate, gradients, speed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# File, title, and the keys drawn into it with their labels.
_PICTURES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("loss.png", "Loss", (("loss", "training"), ("eval_loss", "evaluation"))),
    ("accuracy.png", "Accuracy", (("accuracy", "training"), ("eval_accuracy", "evaluation"))),
    (
        "margins.png",
        "Reward of chosen less that of rejected answers",
        (("rewards/margins", "training"), ("eval_rewards/margins", "evaluation")),
    ),
    ("learning_rate.png", "Learning rate", (("learning_rate", "learning rate"),)),
    ("grad_norm.png", "Gradient norm before clipping", (("grad_norm", "gradient norm"),)),
    ("throughput.png", "Throughput (tokens per second)", (("tokens_per_second", "tokens/s"),)),
)


def draw_images(run_dir: Path) -> list[Path]:
    """Draw what `logging.jsonl` holds into `<run>/images/`; return the files written.

    A picture without a single value is left out.
    """
    lines = _read(run_dir / "logging.jsonl")
    written = []
    for file, title, series in _PICTURES:
        curves = [(label, *_points(lines, key)) for key, label in series]
        curves = [curve for curve in curves if curve[1]]
        if curves:
            if file == "loss.png" and not any(_has_metrics(line) for line in lines):
                title += " (nats per token)"
            folder = run_dir / "images"
            folder.mkdir(exist_ok=True)
            _draw(folder / file, title, curves)
            written.append(folder / file)
    return written


def _has_metrics(line: dict[str, Any]) -> bool:
    """Whether the run learns something else than words: its loss is then no nats per token."""
    return any(key in line for key in ("accuracy", "mse", "rewards/chosen", "rewards/margins"))


def _points(lines: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    chosen = [line for line in lines if line.get(key) is not None]
    return [line["step"] for line in chosen], [line[key] for line in chosen]


def _draw(path: Path, title: str, curves: Sequence[tuple[str, list[int], list[float]]]) -> None:
    # The object interface with its own canvas: no global state, no display, whoever calls.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, steps, values in curves:
        sparse = label == "evaluation" or len(steps) < 3
        axes.plot(steps, values, label=label, linewidth=1.6, marker="o" if sparse else None)
    axes.set_title(title)
    axes.set_xlabel("optimizer step")
    axes.grid(visible=True, alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    part = path.with_name(f".tmp-{path.name}")
    try:
        figure.savefig(part, format="png")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the last line of a killed process may be cut short
            continue
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
    return lines

"""What a training run shows while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SHOWN_APART = frozenset({
    "step", "epoch", "time", "loss", "eval_loss", "learning_rate", "grad_norm",
    "tokens_per_second", "mfu", "data_wait_ms", "peak_memory_gib",
})  # fmt: skip


class Display(Protocol):
    """Shows steps, log lines, evaluations and notes."""

    def step(self, step: int) -> None:
        """An optimizer step is done."""

    def logged(self, line: dict[str, Any]) -> None:
        """A line went to `logging.jsonl`."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def close(self) -> None:
        """Nothing more will be shown."""


def open_display(console: Console, total: int, done: int = 0) -> Display:
    """The display that suits the console: `total` steps in all, `done` before this session."""
    return BarDisplay(console, total, done) if console.is_terminal else LineDisplay(console, total)


def describe(line: dict[str, Any], total: int) -> str:
    """A log line for people."""
    parts = [f"step {line['step']}/{total}"]
    if line.get("loss") is not None:
        parts.append(f"loss {line['loss']:.4f}")
    if line.get("eval_loss") is not None:
        parts.append(f"eval_loss {line['eval_loss']:.4f}")
    parts += [
        f"{name} {value:.4f}"
        for name, value in line.items()
        if name not in _SHOWN_APART and value is not None
    ]
    if line.get("learning_rate") is not None:
        parts.append(f"lr {line['learning_rate']:.2e}")
    if line.get("grad_norm") is not None:
        parts.append(f"grad_norm {line['grad_norm']:.3f}")
    if line.get("tokens_per_second") is not None:
        parts.append(f"{line['tokens_per_second']:,.0f} tok/s")
    if line.get("mfu") is not None:
        parts.append(f"mfu {line['mfu']:.1%}")
    if "loss" in line and line.get("peak_memory_gib") is not None:
        parts.append(f"{line['peak_memory_gib']:.1f} GiB")
    return "  ".join(parts)


class LineDisplay:
    """One line for each log line, for files and pipes."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total

    def step(self, step: int) -> None:
        """Steps in between are not shown."""

    def logged(self, line: dict[str, Any]) -> None:
        """Print the line."""
        self.note(describe(line, self._total))

    def note(self, text: str) -> None:
        """Print the text as it is, whatever its length."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing to undo."""


class BarDisplay:
    """A bar with step, loss, throughput and time left; evaluations scroll above it."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._total = total
        self._console = console
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, completed=done, numbers="")
        self._bar.start()

    def step(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def logged(self, line: dict[str, Any]) -> None:
        """Show loss and throughput in the bar; print an evaluation above it."""
        if "eval_loss" in line:
            self.note(describe(line, self._total))
            return
        rate = line.get("tokens_per_second")
        loss = line.get("loss")
        parts = [f"loss {loss:.4f}" if loss is not None else "loss -"]
        if rate is not None:
            parts.append(f"{rate:,.0f} tok/s")
        self._bar.update(self._task, numbers="  ".join(parts))

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()

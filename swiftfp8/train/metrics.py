"""What a run measures and where it goes: `logging.jsonl`, and the counters that a resume restores.

Loss is the mean over trained tokens of a step, averaged over the steps since the last line.
Tokens are those of the batch that are not padding, prompt tokens included. Time spent evaluating
and saving is left out of the throughput.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from swiftfp8.errors import RunFailed, SwiftFP8Error, raise_all

_REPORTERS = {"tensorboard": "tensorboard", "wandb": "wandb", "swanlab": "swanlab"}


def require_reporters(names: Iterable[str]) -> None:
    """Check that the package behind every `report_to` name is installed.

    Raises:
        SwiftFP8Error: naming what is unknown or missing, with the command that installs it.
    """
    problems = []
    for name in names:
        if name == "none":  # transformers' word for an empty list
            continue
        if name not in _REPORTERS:
            problems.append(
                SwiftFP8Error(
                    f"report_to does not know {name!r}",
                    where="report_to",
                    fix=f"use one of: {', '.join(_REPORTERS)}",
                )
            )
        elif importlib.util.find_spec(_REPORTERS[name]) is None:
            problems.append(
                SwiftFP8Error(
                    f"report_to={name} needs a package that is not installed",
                    where="report_to",
                    fix=f"pip install {_REPORTERS[name]}",
                )
            )
    raise_all(problems)


@dataclass(kw_only=True)
class Progress:
    """Counters of a run that a checkpoint carries, so that a resumed run logs the same numbers.

    `window_*` gather since the last logged line; `steady_*` are of all steps but each session's
    first ones, which warm up.
    """

    elapsed: float = 0.0  # seconds, over all sessions
    window_loss: float = 0.0  # sum of step losses
    window_steps: int = 0
    window_tokens: int = 0
    window_seconds: float = 0.0
    window_wait: float = 0.0  # seconds that the loop waited for rows
    window_sums: dict[str, Any] = field(default_factory=dict)  # of an objective, by name
    steady_tokens: int = 0
    steady_seconds: float = 0.0
    steady_steps: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0  # by FP16's loss scaler, over all sessions
    lowest_eval: float | None = None  # of all evaluations, those without a checkpoint too
    evaluations_since: int = 0  # the lowest one

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """Read what `to_dict` wrote; unknown keys are ignored."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


class Meter:
    """Adds up losses, tokens and time between log lines."""

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak_flops: float | None,
        device: str,
        warmup_steps: int = 1,
    ) -> None:
        self.progress = Progress()
        self._warmup = warmup_steps
        self._flops = flops_per_token
        self._peak = peak_flops
        self._cuda = device == "cuda"
        self._begun = self._mark = time.perf_counter()
        self._earlier = 0.0
        self._session_steps = 0

    def begin(self, progress: Progress | None = None) -> None:
        """Start the clock, from a resumed run's counters where there are some."""
        self.progress = progress or Progress()
        self._earlier = self.progress.elapsed
        self._begun = self._mark = time.perf_counter()
        self._session_steps = 0
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def step_done(self, loss: float, tokens: int, *, skipped: bool = False) -> None:
        """Count an optimizer step: its mean loss and the tokens of its micro-batches."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        p = self.progress
        p.window_loss += loss
        p.window_steps += 1
        p.window_tokens += tokens
        p.skipped_steps += skipped
        p.window_seconds += seconds
        if self._session_steps >= self._warmup:
            p.steady_steps += 1
            p.steady_tokens += tokens
            p.steady_seconds += seconds
        self._session_steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep what happens inside out of the throughput."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._mark += time.perf_counter() - before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens inside as waiting for rows."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self.progress.window_wait += time.perf_counter() - before

    def close_window(self) -> dict[str, Any]:
        """Loss, throughput, MFU and memory since the last call, and begin anew."""
        p = self.progress
        assert p.window_steps, "a line is logged only after a step"
        rate = p.window_tokens / p.window_seconds if p.window_seconds > 0 else None
        values = {
            "loss": p.window_loss / p.window_steps,
            "tokens_per_second": rate,
            "mfu": self.mfu(rate),
            "data_wait_ms": p.window_wait / p.window_steps * 1e3,
            "peak_memory_gib": peak_memory_gib(cuda=self._cuda),
        }
        p.window_loss, p.window_steps, p.window_tokens = 0.0, 0, 0
        p.window_seconds = p.window_wait = 0.0
        return values

    def mfu(self, tokens_per_second: float | None) -> float | None:
        """Share of the device's dense 16-bit peak; None where the peak is not known."""
        if tokens_per_second is None or self._peak is None:
            return None
        return tokens_per_second * self._flops / self._peak

    def elapsed(self) -> float:
        """Seconds since the run began, over all its sessions."""
        self.progress.elapsed = self._earlier + time.perf_counter() - self._begun
        return self.progress.elapsed

    def steady_rate(self) -> float | None:
        """Tokens a second over the run, warm-up steps left out."""
        p = self.progress
        return p.steady_tokens / p.steady_seconds if p.steady_seconds > 0 else None

    def seconds_per_step(self) -> float | None:
        """Seconds of an optimizer step, warm-up steps left out."""
        p = self.progress
        return p.steady_seconds / p.steady_steps if p.steady_steps else None


class RunLog:
    """`logging.jsonl`: one JSON object a line, flushed line by line."""

    def __init__(self, run_dir: Path) -> None:
        """Open for appending; what is there is kept until `drop_after`."""
        self.path = run_dir / "logging.jsonl"
        self._file = self.path.open("a", encoding="utf-8")

    def drop_after(self, step: int) -> None:
        """Drop the lines beyond `step`, from where a run goes on, and one that was cut short."""
        self._file.close()
        kept = [line for line in read_log(self.path.parent) if line["step"] <= step]
        part = self.path.with_name(".tmp-logging.jsonl")
        part.write_text("".join(_to_line(line) for line in kept), encoding="utf-8")
        os.replace(part, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, values: dict[str, Any]) -> None:
        """Write one line; numbers that JSON has no name for become null.

        Raises:
            RunFailed: the line could not be written.
        """
        try:
            self._file.write(_to_line(values))
            self._file.flush()
        except OSError as error:
            raise RunFailed(
                f"could not write {self.path.name}: {error.strerror or error}",
                where=str(self.path),
                fix="make room on the disk, then resume the run",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `logging.jsonl`; a last line that a killed process cut short is left out."""
    path = run_dir / "logging.jsonl"
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def peak_memory_gib(*, cuda: bool) -> float:
    """Peak of allocated GPU memory, or of the process's resident memory without a GPU, in GiB."""
    if cuda:
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _to_line(values: dict[str, Any]) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps(finite) + "\n"

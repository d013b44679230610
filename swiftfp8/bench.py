"""`swiftfp8 bench`: the user's own job by the plan, beside what it would run on otherwise.

Each stack trains the same model on the same rows in a process of its own, some steps to warm up
and some that are timed, and leaves nothing behind. Ours is the training stage itself; the peers
are in bench_peers.py. A stack that can't run is skipped with its reason.

    plan       what `swiftfp8 train` would do
    bf16       the same without FP8
    hf         transformers + PEFT, as most people train
    compiled   that with each decoder layer compiled and Liger's fused loss
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.registry import unknown

if TYPE_CHECKING:
    from swiftfp8.config.compose import Composed
    from swiftfp8.config.schema import Config

STACKS = {
    "plan": "swiftfp8 by the plan",
    "bf16": "swiftfp8 without FP8",
    "hf": "transformers + PEFT, eager",
    "compiled": "transformers + PEFT, layers compiled, Liger's fused loss",
}
DEFAULT_STACKS = ("plan", "hf", "compiled")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to compare: `overrides` are the job's own tokens on top of the recipe `config`."""

    config: str | None
    overrides: tuple[str, ...]
    stacks: tuple[str, ...] = DEFAULT_STACKS
    steps: int = 10
    warmup: int = 3
    out: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stack's result, or why there is none. `speed` and `memory` are over the base's.

    A quarter of the timed steps ran at fewer tokens a second than `quartiles` begin with, and a
    quarter at more than they end with: how far apart they are is the noise of the measurement.
    """

    stack: str
    what: str
    precision: str | None = None
    recompute: str | None = None
    tokens_per_second: float | None = None
    quartiles: Sequence[float] | None = None
    ms_per_step: float | None = None
    peak_gib: float | None = None
    mfu: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    speed: float | None = None
    memory: float | None = None
    skipped: str | None = None


def bench(request: BenchRequest, composed: Composed, console: Console) -> list[Row]:
    """Run every stack, print the table, write the JSON; returns the rows.

    Raises:
        SwiftFP8Error: for a stack that does not exist.
        RunFailed: where no stack could run.
    """
    for name in request.stacks:
        if name not in STACKS:
            raise unknown("stack", name, STACKS, where="stacks")
    rows = []
    for name in request.stacks:
        console.print(f"running {name}: {STACKS[name]}", highlight=False)
        rows.append(_run_apart(name, request))
    rows = add_ratios(rows)
    console.print()
    console.print(results_table(rows))
    for row in rows:
        if row.skipped is not None:
            console.print(Text(f"{row.stack} was skipped: {row.skipped}", style="yellow"))
    target = _write(rows, request, composed.config)
    console.print(f"written to {target}", highlight=False, soft_wrap=True)
    if all(row.skipped for row in rows):
        raise RunFailed("no stack could run", where="bench", fix="see the reasons above")
    return rows


def add_ratios(rows: Sequence[Row]) -> list[Row]:
    """Speed and memory over those of the first stack without FP8 that ran."""
    base = next((row for row in rows if row.stack != "plan" and row.skipped is None), None)
    return [_over(row, base) if base and row.skipped is None else row for row in rows]


def results_table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("stack", "precision", "recompute"):
        table.add_column(column, overflow="fold")
    for column in ("tok/s", "ms/step", "peak GiB", "MFU", "speed", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row.skipped is not None:
            table.add_row(row.stack, Text("skipped", style="yellow"))
            continue
        table.add_row(
            row.stack,
            row.precision or "",
            row.recompute or "",
            _shown(row.tokens_per_second, ".0f") + _spread(row),
            _shown(row.ms_per_step, ".1f"),
            _shown(row.peak_gib, ".1f"),
            _shown(row.mfu, ".1%"),
            _shown(row.speed, ".2f"),
            _shown(row.memory, ".2f"),
        )
    return table


def quartiles(rates: Sequence[float]) -> tuple[float, float] | None:
    """Below the first of them lies a quarter of the rates, above the second another."""
    if len(rates) < 2:
        return None
    first, _, third = statistics.quantiles(rates, n=4, method="inclusive")
    return first, third


def trial_config(config: Config, folder: Path, steps: int) -> Config:
    """The job cut to `steps` optimizer steps, with nothing evaluated, exported or reported."""
    return replace(
        config,
        max_steps=steps,
        val_dataset=(),
        split_dataset_ratio=0.0,
        output_dir=str(folder),
        run_name=None,
        export_dir=None,
        export_quantization_bit=None,
        resume_from_checkpoint=None,
        report_to=(),
        precision=replace(config.precision, start_step=0),
        train=replace(
            config.train,
            logging_steps=1,
            eval_steps=0,
            save_steps=0,
            images=False,
            early_stopping_patience=0,  # which goes by evaluations
        ),
    )


def _run_apart(name: str, request: BenchRequest) -> Row:
    """One stack in a process of its own, which writes its result into a file."""
    with tempfile.TemporaryDirectory(prefix="swiftfp8-bench-") as folder:
        job = {**asdict(request), "stack": name, "folder": folder}
        done = subprocess.run(
            [sys.executable, "-m", "swiftfp8.bench", json.dumps(job)],
            capture_output=True,
            text=True,
            env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ},
        )
        result = Path(folder) / "result.json"
        if done.returncode == 0 and result.exists():
            return Row(stack=name, what=STACKS[name], **json.loads(result.read_text()))
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    said = next((line for line in lines if line.startswith("error:")), lines[-1])
    return Row(stack=name, what=STACKS[name], skipped=said.removeprefix("error: ")[:300])


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """What a stack's process does: compose the job again, train it, return a row's values."""
    from swiftfp8.config.compose import compose_config

    composed = compose_config(job["config"], job["overrides"])
    folder = Path(job["folder"])
    config = trial_config(composed.config, folder, job["warmup"] + job["steps"])
    if job["stack"] in ("plan", "bf16"):
        if job["stack"] == "bf16":
            config = replace(config, dtype="bf16")
        return _train_ours(replace(composed, config=config), job["warmup"])
    from swiftfp8.bench_peers import train_peer

    return train_peer(config, folder, warmup=job["warmup"], compiled=job["stack"] == "compiled")


def _train_ours(composed: Composed, warmup: int) -> dict[str, Any]:
    from swiftfp8 import pipeline
    from swiftfp8.train.metrics import read_log

    result = pipeline.train(composed, warmup_steps=warmup, saves=False)
    plan = json.loads((result.run_dir / "plan.json").read_text())
    lines = [line for line in read_log(result.run_dir) if "loss" in line][warmup:]
    mfus = [line["mfu"] for line in lines if line.get("mfu")]
    recipe, compute = plan["recipe"], plan["compute_dtype"]
    seconds = result.seconds_per_step
    return {
        "precision": f"{recipe['recipe']} by {plan['backend']}" if recipe else compute,
        "recompute": plan["gradient_checkpointing"],
        "tokens_per_second": result.tokens_per_second,
        "quartiles": quartiles([line["tokens_per_second"] for line in lines]),
        "ms_per_step": None if seconds is None else 1e3 * seconds,
        "peak_gib": result.peak_memory_gib,
        "mfu": sum(mfus) / len(mfus) if mfus else None,
        "first_loss": result.first_loss,
        "last_loss": result.last_loss,
    }


def _over(row: Row, base: Row) -> Row:
    def ratio(mine: float | None, others: float | None) -> float | None:
        return mine / others if mine and others else None

    return replace(
        row,
        speed=ratio(row.tokens_per_second, base.tokens_per_second),
        memory=ratio(row.peak_gib, base.peak_gib),
    )


def _write(rows: Sequence[Row], request: BenchRequest, config: Config) -> Path:
    from swiftfp8.train.run_dir import describe_environment, write_json

    name = f"bench-{datetime.now():%Y%m%d-%H%M%S}.json"
    target = Path(request.out).expanduser() if request.out else Path(config.output_dir) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        target,
        {
            "request": asdict(request),
            "environment": describe_environment(config.seed),
            "rows": [asdict(row) for row in rows],
        },
    )
    return target


def _spread(row: Row) -> str:
    """Half the distance between the quartiles, as a share of the speed."""
    if row.quartiles is None or not row.tokens_per_second:
        return ""
    low, high = row.quartiles
    return f" ±{(high - low) / 2 / row.tokens_per_second:.0%}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _main(text: str) -> int:
    from swiftfp8.failures import report

    job = json.loads(text)
    try:
        values = _work(job)
    except SwiftFP8Error as error:
        return report(error)
    (Path(job["folder"]) / "result.json").write_text(json.dumps(values))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))

"""The benchmark's table, its ratios, and the job that each stack is given."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from swiftfp8 import bench as module
from swiftfp8.bench import (
    STACKS,
    BenchRequest,
    Row,
    add_ratios,
    bench,
    quartiles,
    results_table,
    trial_config,
)
from swiftfp8.config.compose import Composed, compose_config
from swiftfp8.config.schema import Config
from swiftfp8.errors import RunFailed, SwiftFP8Error


def row(stack: str, **values: Any) -> Row:
    return Row(stack=stack, what=STACKS[stack], **values)


def composed() -> Composed:
    return compose_config("quickstart")


def test_ratios_are_over_the_first_peer_that_ran() -> None:
    rows = add_ratios(
        [
            row("plan", tokens_per_second=300.0, peak_gib=2.0),
            row("hf", skipped="out of memory"),
            row("compiled", tokens_per_second=150.0, peak_gib=8.0),
        ]
    )
    assert (rows[0].speed, rows[0].memory) == (2.0, 0.25)
    assert rows[1].speed is None
    assert rows[2].speed == 1.0


def test_a_row_shows_how_far_its_steps_spread() -> None:
    assert quartiles([10.0, 20.0, 30.0, 40.0, 50.0]) == (20.0, 40.0)
    assert quartiles([10.0]) is None
    out = io.StringIO()
    rows = [row("plan", tokens_per_second=30.0, quartiles=(20.0, 40.0)), row("hf")]
    Console(file=out, width=120).print(results_table(rows))
    assert "30 ±33%" in out.getvalue()


@pytest.mark.skipif(torch.cuda.is_available(), reason="threads are the CPU's affair")
@pytest.mark.parametrize("stack", ["plan", "hf"])
def test_every_stack_has_the_plans_threads_and_a_spread(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    forward = torch.nn.Linear.forward

    def watched(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.add(torch.get_num_threads())
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", watched)
    tokens = [
        "max_length=32",
        "dtype=bf16",
        "per_device_train_batch_size=2",
        "dataset=quickstart#9",
    ]
    job = {"config": "quickstart", "overrides": tokens, "folder": str(tmp_path), "stack": stack}
    try:
        values = module._work({**job, "warmup": 1, "steps": 3})
    finally:
        torch.set_num_threads(before)
    assert seen == {1}  # of the embedded model, on a CPU
    low, high = values["quartiles"]
    assert 0 < low <= high


def test_without_a_peer_there_is_no_ratio() -> None:
    (alone,) = add_ratios([row("plan", tokens_per_second=300.0)])
    assert alone.speed is None


def test_a_trial_is_short_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = Config(
        val_dataset=["rows.jsonl"], export_dir="out", report_to=["wandb"], max_steps=1000,
        precision={"start_step": 20, "recipe": "fp8_block"},
        train={"save_steps": 5, "eval_steps": 5, "early_stopping_patience": 3}, learning_rate=3e-4,
    )  # fmt: skip
    trial = trial_config(config, tmp_path, 13)
    assert (trial.max_steps, trial.val_dataset, trial.report_to) == (13, (), ())
    assert trial.export_dir is None and trial.output_dir == str(tmp_path)
    assert (trial.precision.start_step, trial.precision.recipe) == (0, "fp8_block")
    assert (trial.train.save_steps, trial.train.images) == (0, False)
    # With no evaluation left, the plan would refuse early stopping.
    assert trial.train.early_stopping_patience == 0
    assert trial.learning_rate == 3e-4


def test_an_unknown_stack_gets_a_suggestion(tmp_path: Path) -> None:
    request = BenchRequest(config="quickstart", overrides=(), stacks=("compild",))
    with pytest.raises(SwiftFP8Error, match="unknown stack 'compild'") as caught:
        bench(request, composed(), Console(file=io.StringIO()))
    assert "compiled" in str(caught.value)


def test_what_a_process_says_when_it_fails_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        job = json.loads(command[-1])
        if job["stack"] == "hf":
            values = {"tokens_per_second": 10.0, "ms_per_step": 5.0, "peak_gib": 1.0}
            (Path(job["folder"]) / "result.json").write_text(json.dumps(values))
            return subprocess.CompletedProcess(command, 0, "", "")
        said = "warning: x\nerror: the GPU ran out of memory at step 1\n  fix: less\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(module.subprocess, "run", run)
    out = io.StringIO()
    target = tmp_path / "deep" / "bench.json"
    request = BenchRequest(
        config="quickstart", overrides=(), stacks=("plan", "hf"), out=str(target)
    )
    rows = bench(request, composed(), Console(file=out, width=100))
    assert rows[0].skipped == "the GPU ran out of memory at step 1"
    assert "plan was skipped: the GPU ran out of memory" in out.getvalue()
    written = json.loads(target.read_text())
    assert [r["stack"] for r in written["rows"]] == ["plan", "hf"]
    assert written["rows"][1]["speed"] == 1.0
    only = BenchRequest(config="quickstart", overrides=(), stacks=("plan",), out=str(target))
    with pytest.raises(RunFailed, match="no stack could run"):
        bench(only, composed(), Console(file=out))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": {"name": "lion"}}, "optim.name=lion"),
        ({"lora_plus_ratio": 16.0}, "lora_plus_ratio"),
        ({"task": "dpo"}, "not in dpo"),
    ],
)
def test_a_peer_that_would_train_otherwise_is_skipped(
    options: Any, said: str, tmp_path: Path
) -> None:
    from swiftfp8.bench_peers import train_peer

    with pytest.raises(SwiftFP8Error, match=said):
        train_peer(Config(**options), tmp_path, warmup=1, compiled=False)

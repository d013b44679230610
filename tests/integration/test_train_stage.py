"""The training stage as a whole: what is killed, interrupted or resumed ends as if it never was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from train_kit import Rows, make_config, make_rows, pad, train

from swiftfp8.train.metrics import read_log


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_log(run_dir) if "loss" in line}


@pytest.mark.parametrize(
    ("tuner", "accumulation", "stop_at", "options"),
    [
        ("lora", 1, 4, {}),  # inside the first epoch
        ("lora", 2, 4, {}),  # inside the second, whose last step has one micro-batch only
        ("lora", 2, 3, {"fp8": True}),  # where an epoch ends
        ("full", 1, 4, {}),
    ],
)
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(
    tmp_path, tuner, accumulation, stop_at, options
):
    # Ten rows are five micro-batches; dropout makes every step depend on the random state.
    config = make_config(
        max_steps=8,
        gradient_accumulation_steps=accumulation,
        weight_decay=0.1,
        train={"save_steps": stop_at, "logging_steps": 3, "save_total_limit": 5},
    )
    options = {"tuner": tuner, "rows": make_rows(10, 2), **options}
    if tuner == "lora":
        options["dropout"] = 0.2
    train(tmp_path / "whole", config, **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    resume = tmp_path / "again" / f"checkpoint-{stop_at}"
    result, shown = train(tmp_path / "again", config, resume=resume, **options)
    assert f"resuming at step {stop_at}" in shown
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    norms = [[line.get("grad_norm") for line in read_log(tmp_path / n)] for n in ("whole", "again")]
    assert norms[0] == norms[1]
    evals = [[line.get("eval_loss") for line in read_log(tmp_path / n)] for n in ("whole", "again")]
    assert evals[0] == evals[1]
    assert result.steps == 8


def interrupting(rows: Rows, at: int, number: int = signal.SIGINT, times: int = 1) -> Rows:
    """Send this process signals while the `at`-th micro-batch is put together."""
    count = 0

    def collate(batch):
        nonlocal count
        count += 1
        if count == at:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return pad(batch)

    return Rows(train=rows.train, eval=rows.eval, collator=collate)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_resumed_run_is_the_uninterrupted_one(tmp_path, number):
    config = make_config(max_steps=7, train={"logging_steps": 4, "images": True})
    rows = make_rows(12, 2)
    train(tmp_path / "whole", config, rows=rows, dropout=0.2)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stopped = tmp_path / "stopped"
    result, shown = train(stopped, config, rows=interrupting(rows, 3, number), dropout=0.2)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert result.interrupted
    assert 2 <= result.steps <= 3  # the loader may be one micro-batch ahead of the step
    assert f"resume_from_checkpoint={stopped}" in shown
    assert not (stopped / "result.json").exists()
    assert (stopped / "images" / "loss.png").exists()
    result, _ = train(stopped, config, rows=rows, dropout=0.2, resume=stopped)
    assert not result.interrupted
    assert losses(stopped) == losses(tmp_path / "whole")


def test_a_signal_during_evaluation_ends_it_and_saves(tmp_path):
    rows = make_rows(4, 4)
    evaluation = 0

    def collate(batch):
        nonlocal evaluation
        if batch[0] in rows.eval:
            evaluation += 1
            if evaluation == 2:
                os.kill(os.getpid(), signal.SIGINT)
        return pad(batch)

    spied = Rows(train=rows.train, eval=rows.eval, collator=collate)
    config = make_config(max_steps=50, train={"eval_steps": 2})
    result, _ = train(tmp_path, config, rows=spied)
    assert result.interrupted
    assert result.steps == 2
    assert result.eval_loss is None
    assert result.last_checkpoint == tmp_path / "checkpoint-2"


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(
            tmp_path,
            make_config(train={"images": True}),
            rows=interrupting(make_rows(), 3, times=2),
        )
    assert not list(tmp_path.glob("checkpoint-*"))
    assert not (tmp_path / "images").exists()  # drawing takes seconds


def test_kill_9_and_resume_give_the_losses_of_the_uninterrupted_run(tmp_path):
    options = "max_steps=9, gradient_accumulation_steps=2, train={'save_steps': 3}"
    code = textwrap.dedent(f"""
        import os, signal, sys
        from pathlib import Path
        import torch
        from train_kit import Rows, make_config, make_rows, pad, train
        torch.set_num_threads(1)
        count = 0

        def collate(batch):
            global count
            count += 1
            if count == 14:  # within the seventh or eighth step
                os.kill(os.getpid(), signal.SIGKILL)
            return pad(batch)

        rows = Rows(train=make_rows(10).train, eval=None, collator=collate)
        train(Path(sys.argv[1]), make_config({options}), rows=rows, dropout=0.2)
    """)
    config = make_config(max_steps=9, gradient_accumulation_steps=2, train={"save_steps": 3})
    killed = tmp_path / "killed"
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", code, str(killed)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert max(losses(killed)) > 6  # lines beyond the last checkpoint, to be written again
    train(killed, config, rows=make_rows(10), dropout=0.2, resume=killed)
    train(tmp_path / "whole", config, rows=make_rows(10), dropout=0.2)
    assert losses(killed) == losses(tmp_path / "whole")
    steps = [line["step"] for line in read_log(killed)]
    assert steps == list(range(1, 10))

"""`swiftfp8 bench` through the command line, on the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(folder: Path, *tokens: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swiftfp8", "bench", *tokens],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def test_the_stacks_train_the_same_job(tmp_path: Path) -> None:
    done = run(
        tmp_path, "config=quickstart", "steps=2", "warmup=1", "out=bench.json", "dtype=fp32",
        "gradient_accumulation_steps=2", "stacks=plan,hf,compiled",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ours, peer, compiled = json.loads((tmp_path / "bench.json").read_text())["rows"]
    for row in (ours, peer):
        assert row["tokens_per_second"] > 0 and row["ms_per_step"] > 0 and row["peak_gib"] > 0
        # Tokens of a step: both counted the same ones.
        assert row["tokens_per_second"] * row["ms_per_step"] == pytest.approx(
            peer["tokens_per_second"] * peer["ms_per_step"], rel=1e-3
        )
    assert ours["first_loss"] == pytest.approx(peer["first_loss"], rel=1e-4)
    assert peer["speed"] == 1.0 and ours["speed"] > 0
    assert "on a GPU only" in compiled["skipped"]
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]  # nothing else is left


def test_a_count_must_be_a_whole_number(tmp_path: Path) -> None:
    done = run(tmp_path, "config=quickstart", "steps=0")
    assert done.returncode == 2
    assert "steps must be a whole number of at least 1" in done.stderr

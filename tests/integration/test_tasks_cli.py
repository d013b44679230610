"""Other tasks by the real command line: a packaged recipe learns, a mistake is explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swiftfp8", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_packaged_preferences_are_learned(tmp_path: Path) -> None:
    done = run(
        tmp_path, "train", "config=dpo_quickstart", "max_steps=10", "run_name=quiet",
        "train.eval_steps=0", "train.images=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "output/quiet/result.json").read_text())
    assert result["metrics"]["eval_rewards/margins"] > 1
    assert result["metrics"]["eval_rewards/accuracies"] == 1.0
    assert "adapter off" in " ".join(done.stdout.split())
    asked = run(tmp_path, "eval", "run=output/quiet", "limit=2", "max_new_tokens=8")
    assert asked.returncode == 0, asked.stderr
    assert "2 evaluation rows" in asked.stdout


def test_rows_of_another_task_end_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('\n{"instruction": "q", "output": "a"}\n')
    done = run(tmp_path, "train", "model_type=tiny", "task=dpo", "dataset=chat.jsonl")
    assert done.returncode == 2
    assert "no row format of task=dpo fits the columns instruction, output" in done.stderr
    assert "chat.jsonl:2" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "output").exists()

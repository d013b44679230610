"""A real encoder learns real topics: MiniLM on BBC news, in every precision that a CPU has."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from real_models import bbc_topics, minilm

STEPS = 120
MIN_ACCURACY = 0.93
HELD_OUT = 400
PRECISIONS = {
    "fp32": ["dtype=fp32"],
    "bf16": ["dtype=bf16"],
    "fp8": ["dtype=fp8", "precision.emulate=true"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """train.jsonl and held-out.jsonl, drawn once."""
    folder = tmp_path_factory.mktemp("bbc")
    documents = [json.dumps({"text": text, "label": topic}) for text, topic in bbc_topics()]
    assert len(documents) == 2225
    random.Random(0).shuffle(documents)
    parts = {"held-out": documents[:HELD_OUT], "train": documents[HELD_OUT:]}
    for name, lines in parts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_minilm_tells_topics_of_held_out_news(tmp_path: Path, rows: Path, precision: str) -> None:
    command = [
        *(sys.executable, "-m", "swiftfp8", "train", "config=seq_cls_minilm"),
        f"model={minilm()}",
        f"dataset={rows / 'train.jsonl'}",
        f"val_dataset={rows / 'held-out.jsonl'}",
        f"max_steps={STEPS}",
        "train.eval_steps=0",
        "output_dir=output",
        "run_name=news",
        *PRECISIONS[precision],
    ]
    repository = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "output/news/result.json").read_text())
    print(result["metrics"])
    assert result["metrics"]["eval_accuracy"] >= MIN_ACCURACY
    if precision == "fp8":
        report = json.loads((tmp_path / "output/news/precision_report.json").read_text())
        assert report["measured"]["kept"] == 1.0 and report["measured"]["measured"] > 0.9

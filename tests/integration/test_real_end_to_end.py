"""The main job on a real pretrained model: train on chat rows, export, compare on held-out text.

SWIFTFP8_ENGINE_PYTHON names an environment with vLLM, which then runs the exports too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_models import bbc_news, gemma3_270m_gguf

# The calibrated export takes eleven minutes where seven processes share two cores, and longer where
# vLLM runs it too: the limit is for what hangs, not for what is slow.
pytestmark = [pytest.mark.real, pytest.mark.timeout(7200)]

# What plain rounding to FP8 can keep on a model as small as 270M parameters, with room for another
# text: measured 1.022, 0.019 and 91.4% on BBC news.
LIMITS = ("export.max_ppl_ratio=1.03", "export.max_kl=0.06", "export.min_top1=0.88")
# Calibrated on other articles of BBC news, KL fell by 44%.
CALIBRATED_SHARE = 2 / 3
NO_RISE = 0.005


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned run, text to judge it by, and rows of other text."""
    folder = tmp_path_factory.mktemp("gemma")
    judges = bbc_news(documents=20)
    (folder / "news.txt").write_text("\n\n".join(judges), encoding="utf-8")
    others = [text for text in bbc_news(documents=60) if text not in judges]
    rows = "\n".join(json.dumps({"text": text}) for text in others)
    (folder / "other_news.jsonl").write_text(rows, encoding="utf-8")
    run_command(
        folder,
        "train",
        "config=quickstart",
        "model_type=gemma3",
        f"model={gemma3_270m_gguf()}",
        "template=gemma",
        "max_steps=20",
        "learning_rate=2e-4",
        "lora_rank=16",
        "per_device_train_batch_size=4",
        "train.eval_steps=5",
        "train.logging_steps=5",
        "output_dir=output",
        "run_name=gemma",
    )
    return folder


@pytest.fixture(scope="module")
def block(folder: Path) -> dict[str, Any]:
    return export(folder, "fp8_block")


def test_gemma3_trains(folder: Path) -> None:
    lines = (folder / "output/gemma/logging.jsonl").read_text().splitlines()
    evals = [record["eval_loss"] for record in map(json.loads, lines) if "eval_loss" in record]
    assert evals[-1] < 0.9 * evals[0], evals


def test_blocks_keep_it_itself(block: dict[str, Any]) -> None:
    check(block)


def test_channels_keep_it_itself(folder: Path) -> None:
    check(export(folder, "compressed_tensors"))


def test_calibrated_rounding_keeps_it_better(folder: Path, block: dict[str, Any]) -> None:
    report = export(
        folder,
        "fp8_block",
        "export.calibrate=true",
        "export.calibration_dataset=[other_news.jsonl]",
        "export.calibration_tokens=8192",
    )
    check(report)
    assert report["fidelity"]["token_kl"] < CALIBRATED_SHARE * block["fidelity"]["token_kl"]


def export(folder: Path, name: str, *options: str) -> dict[str, Any]:
    """The report of an export that holds its limits, or else fails."""
    engine = os.environ.get("SWIFTFP8_ENGINE_PYTHON")
    options = (
        (*options, f"export.engine_python={engine}", "export.smoke=auto") if engine else options
    )
    target = f"{name}-{len(options)}"
    run_command(
        folder,
        "export",
        "run=output/gemma",
        f"export.format={name}",
        f"export_dir={target}",
        "export.fidelity=fail",
        f"export.max_loss_increase={NO_RISE}",
        "export.fidelity_dataset=news.txt",
        *LIMITS,
        *options,
    )
    report: dict[str, Any] = json.loads((folder / target / "export_report.json").read_text())
    return report


def check(report: dict[str, Any]) -> None:
    shown = {key: report[key] for key in ("format", "fidelity", "loss", "engine", "verdicts")}
    print(json.dumps(shown, indent=1))
    assert report["reload"] is not None
    assert report["fidelity"]["text"] == "news.txt"
    figures = {verdict["figure"]: verdict["passed"] for verdict in report["verdicts"]}
    assert all(figures.values()), report["verdicts"]
    assert {"perplexity ratio", "token KL", "top-1 agreement", "evaluation loss"} <= set(figures)
    loss = report["loss"]
    assert loss["export"] < (1 + NO_RISE + loss["error"]) * loss["trained"]


def run_command(folder: Path, *arguments: str) -> None:
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "swiftfp8", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

"""Preferences and labels in real FP8: it runs in FP8, it learns, and DPO costs what SFT costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from task_kit import CASES, evaluations, run_task, write_decoder, write_encoder, write_rows

TORCH = {"dtype": "fp8", "precision": {"recipe": "fp8_current", "backend": "torch", "strict": True}}
TE = {"dtype": "fp8", "precision": {"recipe": "fp8_current", "backend": "te", "strict": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "decoder": write_decoder(folder / "decoder", hidden=256),
        "encoder": write_encoder(folder / "encoder", hidden=256),
    }


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *[(name, TE) for name in ("dpo", "kto", "seq_cls", "seq_cls-encoder", "reward")],
        *[(name, TORCH) for name in ("dpo", "seq_cls")],
    ],
)
def test_it_learns_in_fp8(
    tmp_path: Path, models: dict[str, Path], name: str, engine: dict[str, Any]
) -> None:
    case = CASES[name]
    options = {**case.options, **engine, "learning_rate": 3e-3}
    result, shown = run_task(tmp_path, models[case.model], case.rows, **options)
    assert f"fp8_current by {engine['precision']['backend']}" in shown
    first, *_, last = evaluations(result.run_dir, case.metric)
    assert last > first if case.higher else last < first
    report = json.loads((result.run_dir / "precision_report.json").read_text())
    assert report["measured"]["kept"] == 1.0 and not report["measured"]["missing"]


def test_a_fully_trained_classifier_learns_in_fp8(tmp_path: Path, models: dict[str, Path]) -> None:
    options = {**CASES["seq_cls"].options, **TE, "tuner": "full", "learning_rate": 1e-3}
    result, _ = run_task(tmp_path, models["decoder"], "label", **options)
    losses = evaluations(result.run_dir, "eval_loss")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("engine", [TE, TORCH], ids=["te", "torch"])
def test_log_ratios_in_fp8_start_at_zero(
    tmp_path: Path, models: dict[str, Path], engine: dict[str, Any]
) -> None:
    """Before its first update the model is its own reference; then the margin grows."""
    options = {**CASES["dpo"].options, **engine, "train": {"logging_steps": 1}}
    result, _ = run_task(tmp_path, models["decoder"], "preference", **options)
    lines = [
        json.loads(line) for line in (result.run_dir / "logging.jsonl").read_text().splitlines()
    ]
    trained = [line for line in lines if "rewards/margins" in line]
    assert abs(trained[0]["rewards/chosen"]) < 1e-2 and abs(trained[0]["rewards/rejected"]) < 1e-2
    assert trained[-1]["rewards/margins"] > 0.1


def test_dpo_peaks_where_sft_peaks_at_the_same_tokens(tmp_path: Path) -> None:
    model = write_decoder(tmp_path / "model", hidden=1024)
    answers = ["word " * 200, "other " * 200]
    pair = {"prompt": "say", "chosen": answers[0], "rejected": answers[1]}
    single = {"instruction": "say", "output": answers[0]}
    rows = {"pairs": [pair] * 32, "singles": [single] * 32}
    for name, made in rows.items():
        write_rows(tmp_path / f"{name}.jsonl", made)
        write_rows(tmp_path / f"{name}-held.jsonl", made[:4])
    brief = {
        **TE,
        "max_steps": 3,
        "max_length": 256,
        "gradient_checkpointing": "none",
        "per_device_eval_batch_size": 1,
        "train": {"eval_steps": 0, "save_steps": 0},
    }
    sft, _ = run_task(
        tmp_path, model, "singles", name="sft", task="sft", per_device_train_batch_size=16, **brief
    )
    dpo, _ = run_task(
        tmp_path, model, "pairs", name="dpo", task="dpo", per_device_train_batch_size=8, **brief
    )
    assert dpo.peak_memory_gib <= 1.15 * sft.peak_memory_gib

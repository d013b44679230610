"""Every task in every precision on tiny models: it trains, resumes exactly, and gets better."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from task_kit import CASES, PRECISIONS, evaluations, run_task, write_decoder, write_encoder

from swiftfp8.train.metrics import read_log


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "decoder": write_decoder(folder / "decoder"),
        "encoder": write_encoder(folder / "encoder"),
    }


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def log_of(run_dir: Path) -> list[dict]:
    """Log lines without what time and memory say."""
    dropped = {"time", "tokens_per_second", "mfu", "peak_memory_gib"}
    lines = read_log(run_dir)
    return [{key: value for key, value in line.items() if key not in dropped} for line in lines]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_gets_better_and_resumes_exactly(tmp_path, models, name, precision):
    case = CASES[name]
    options = {**case.options, **PRECISIONS[precision], "lora_dropout": 0.05}
    result, shown = run_task(tmp_path, models[case.model], case.rows, **options)
    measured = evaluations(result.run_dir, case.metric)
    assert len(measured) == 3
    assert measured[-1] > measured[0] if case.higher else measured[-1] < measured[0], measured
    if case.rows == "label":
        assert result.metrics["eval_accuracy"] == 1.0
    if precision == "fp8":
        assert "fp8_current by emulated" in shown
        assert "WARNING" not in shown

    shutil.copytree(result.run_dir, tmp_path / "again", symlinks=True)
    resumed, shown = run_task(
        tmp_path,
        models[case.model],
        case.rows,
        name="again",
        resume_from_checkpoint=str(tmp_path / "again" / "checkpoint-3"),
        **options,
    )
    assert "resuming at step 3" in shown
    assert log_of(resumed.run_dir) == log_of(result.run_dir)
    assert resumed.metrics == result.metrics

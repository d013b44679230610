"""Every task in every precision on tiny models: it trains, resumes exactly, and gets better."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from task_kit import CASES, PRECISIONS, evaluations, run_task, write_decoder, write_encoder

from swiftfp8.errors import SwiftFP8Error
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
    dropped = {"time", "tokens_per_second", "mfu", "data_wait_ms", "peak_memory_gib"}
    lines = read_log(run_dir)
    return [{key: value for key, value in line.items() if key not in dropped} for line in lines]


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_log(run_dir) if "loss" in line]


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


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_a_reference_computed_before_training(tmp_path, models, tuner):
    options = {"task": "dpo", "tuner": tuner, "dtype": "fp32", "learning_rate": 0.002}
    known = {**options, "rlhf": {"precompute_ref": True}}
    result, shown = run_task(tmp_path, models["decoder"], "preference", **known)
    assert "reference's log-probabilities of 40 rows" in shown
    margins = evaluations(result.run_dir, "eval_rewards/margins")
    assert margins[-1] > margins[0]
    shutil.copytree(result.run_dir, tmp_path / "again", symlinks=True)
    resume = str(tmp_path / "again" / "checkpoint-3")
    resumed, shown = run_task(
        tmp_path, models["decoder"], "preference", name="again", resume_from_checkpoint=resume,
        **known,
    )  # fmt: skip
    assert "log-probabilities of" not in shown  # they lie in the run directory
    assert log_of(resumed.run_dir) == log_of(result.run_dir)
    if tuner == "lora":
        step_by_step, _ = run_task(
            tmp_path, models["decoder"], "preference", name="usual", **options
        )
        usual = losses_of(step_by_step.run_dir)
        assert usual == pytest.approx(losses_of(result.run_dir), abs=1e-5)


def test_a_reference_computed_before_fp8_is_switched_on(tmp_path, models):
    """It is the model without FP8 for the steps before, and with it for those after."""
    late = {**PRECISIONS["fp8"], "precision": {**PRECISIONS["fp8"]["precision"], "start_step": 4}}
    brief = {"task": "dpo", "learning_rate": 0.002, "train": {"save_steps": 0, "logging_steps": 1}}
    found = []
    for name, known in (("known", True), ("usual", False)):
        options = {**late, **brief, "rlhf": {"precompute_ref": known}}
        result, _ = run_task(tmp_path, models["decoder"], "preference", name=name, **options)
        found.append(losses_of(result.run_dir))
    known, usual = found
    assert known[:4] == pytest.approx(usual[:4], abs=1e-6)
    assert known[4:] == pytest.approx(usual[4:], abs=2e-3)  # FP8's scales go by the whole batch
    assert known[0] == pytest.approx(math.log(2), abs=1e-7)


@pytest.mark.parametrize("loss_type", ["hinge", "ipo", "apo_zero", "apo_down", "orpo", "simpo"])
def test_every_loss_on_pairs_widens_the_margin(tmp_path, models, loss_type):
    result, _ = run_task(
        tmp_path, models["decoder"], "preference", task="dpo", dtype="fp32",
        rlhf={"loss_type": loss_type}, train={"save_steps": 0},
    )  # fmt: skip
    margins = evaluations(result.run_dir, "eval_rewards/margins")
    assert margins[-1] > margins[0], margins


@pytest.mark.parametrize(
    ("rows", "metric", "higher"), [("several", "eval_f1", True), ("number", "eval_mse", False)]
)
def test_several_labels_and_numbers(tmp_path, models, rows, metric, higher):
    result, shown = run_task(
        tmp_path,
        models["decoder"],
        rows,
        task="seq_cls",
        dtype="fp32",
        learning_rate=0.003,
        train={"save_steps": 0},
    )
    first, *_, last = evaluations(result.run_dir, metric)
    assert last >= first if higher else last < first
    assert ("labels are lists" if rows == "several" else "with a fraction") in shown


def test_gradients_accumulate_to_the_whole_batch(tmp_path, models):
    options = {"task": "reward", "dtype": "fp32", "max_steps": 3, "train": {"save_steps": 0}}
    whole, _ = run_task(tmp_path, models["decoder"], "preference", name="whole", **options)
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    parts, _ = run_task(tmp_path, models["decoder"], "preference", name="parts", **options)
    assert losses_of(whole.run_dir) == pytest.approx(losses_of(parts.run_dir), rel=1e-4)


def test_a_checkpoint_of_another_task_is_refused(tmp_path, models):
    brief = {"dtype": "fp32", "max_steps": 2, "train": {"save_steps": 0}}
    result, _ = run_task(tmp_path, models["decoder"], "preference", task="dpo", **brief)
    with pytest.raises(SwiftFP8Error, match="task is reward, was dpo"):
        run_task(
            tmp_path, models["decoder"], "preference", name="other", task="reward",
            resume_from_checkpoint=str(result.run_dir), **brief,
        )  # fmt: skip


def test_an_encoder_without_a_pooler(tmp_path):
    """Embeddings don't read it; a score would be read from random numbers."""
    folder = write_encoder(tmp_path / "encoder")
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "pooler" not in name}
    assert len(kept) == len(weights) - 2
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    brief = {"dtype": "fp32", "max_steps": 2, "train": {"save_steps": 0}}
    result, _ = run_task(tmp_path, folder, "embedding", task="embedding", **brief)
    assert result.steps == 2
    with pytest.raises(SwiftFP8Error, match="has no pooler"):
        run_task(tmp_path, folder, "label", name="other", task="seq_cls", **brief)

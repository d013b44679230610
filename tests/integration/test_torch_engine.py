"""The torch backend through the training stage: on a CPU its kernels run as their references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from train_kit import make_config, make_rows, train

from swiftfp8.inject import inject_precision, measure_coverage
from swiftfp8.plan import LossPlan
from swiftfp8.precision import torch_native

CONFIG = make_config(max_steps=30, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def _engine_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "available", lambda: None)


def fused_run(run_dir: Path, *, tied: bool = False, **options):
    import torch
    from model_kit import plan_for, tiny_llama, tiny_qwen2

    from swiftfp8.plan import RecipeOptions

    model = tiny_qwen2() if tied else tiny_llama(hidden=64)
    plan = plan_for(model, recipe=RecipeOptions(recipe="fp8_current"), backend="torch", **options)
    torch.manual_seed(7)
    injected = inject_precision(model, plan, "cpu")
    rows = make_rows(evaluation=4)
    result, shown = train(run_dir, CONFIG, rows=rows, model=(injected, plan))
    return result, injected, plan, shown


@pytest.mark.parametrize("gradient_checkpointing", ["none", "selective", "full"])
def test_it_learns_as_the_emulated_backend_does_and_covers_its_layers(
    tmp_path: Path, gradient_checkpointing: str
) -> None:
    result, model, plan, _ = fused_run(
        tmp_path / "torch", gradient_checkpointing=gradient_checkpointing
    )
    other, _ = train(tmp_path / "emulated", CONFIG, rows=make_rows(evaluation=4), fp8=True)
    assert measure_coverage(model, plan).kept == 1.0
    assert result.last_loss < 0.9 * result.first_loss
    # Both round to FP8, with scales of another grain.
    assert result.first_loss == pytest.approx(other.first_loss, rel=0.02)
    assert result.last_loss == pytest.approx(other.last_loss, rel=0.05)
    assert result.eval_loss == pytest.approx(other.eval_loss, rel=0.05)


def test_full_tuning_runs_linear_by_linear(
    tmp_path: Path,
) -> None:
    result, model, plan, _ = fused_run(tmp_path / "torch", tuner="full")
    assert not any(hasattr(module, "fused") for module in model.modules())
    assert measure_coverage(model, plan).kept == 1.0
    assert result.last_loss < result.first_loss


@pytest.mark.parametrize("tied", [False, True])
def test_an_fp8_head_trains_as_a_high_one(tmp_path: Path, tied: bool) -> None:
    high, *_ = fused_run(tmp_path / "high", tied=tied)
    fp8, model, plan, _ = fused_run(tmp_path / "fp8", tied=tied, head="fp8")
    base = model.get_base_model()
    assert type(base.lm_head).__name__ == "RowwiseFrozenLinear"
    assert base.get_input_embeddings().weight.dtype == torch.float32
    covered = measure_coverage(model, plan)
    assert covered.kept == covered.measured == 1.0
    assert fp8.first_loss == pytest.approx(high.first_loss, rel=0.02)
    assert fp8.last_loss == pytest.approx(high.last_loss, rel=0.05)
    assert fp8.eval_loss == pytest.approx(high.eval_loss, rel=0.05)


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_the_fused_loss_trains_and_evaluates_as_the_plain_one(tmp_path: Path, tuner: str) -> None:
    config = make_config(max_steps=6, gradient_accumulation_steps=2)
    rows = make_rows(evaluation=4)
    results = [
        train(
            tmp_path / str(fused),
            config,
            rows=rows,
            tuner=tuner,
            loss=LossPlan(fused=fused, reason=""),
        )[0]
        for fused in (False, True)
    ]
    plain, fused = results
    assert fused.first_loss == pytest.approx(plain.first_loss, rel=1e-5)
    assert fused.last_loss == pytest.approx(plain.last_loss, rel=1e-4)
    assert fused.eval_loss == pytest.approx(plain.eval_loss, rel=1e-4)


def test_checkpointing_changes_no_loss(tmp_path: Path) -> None:
    losses = {}
    for mode in ("none", "selective", "full"):
        result, *_ = fused_run(tmp_path / mode, gradient_checkpointing=mode)
        losses[mode] = (result.first_loss, result.last_loss)
    assert losses["selective"] == losses["full"] == losses["none"]

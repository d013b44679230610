"""The torch backend through the training stage: on a CPU its kernels run as their references."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_kit import make_config, make_rows, train

from swiftfp8.inject import inject_precision, measure_coverage
from swiftfp8.precision import torch_native

CONFIG = make_config(max_steps=30, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def _engine_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "available", lambda: None)


def fused_run(run_dir: Path, **options):
    import torch
    from model_kit import plan_for, tiny_llama

    from swiftfp8.plan import RecipeOptions

    model = tiny_llama(hidden=64)
    plan = plan_for(model, recipe=RecipeOptions(recipe="fp8_current"), backend="torch", **options)
    torch.manual_seed(7)
    injected = inject_precision(model, plan, "cpu")
    rows = make_rows(evaluation=4)
    result, shown = train(run_dir, CONFIG, rows=rows, model=(injected, plan))
    return result, injected, plan, shown


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_it_learns_as_the_emulated_backend_does_and_covers_its_layers(
    tmp_path: Path, gradient_checkpointing: bool
) -> None:
    result, model, plan, shown = fused_run(
        tmp_path / "torch", gradient_checkpointing=gradient_checkpointing
    )
    other, _ = train(tmp_path / "emulated", CONFIG, rows=make_rows(evaluation=4), fp8=True)
    assert "not fused" not in shown
    assert measure_coverage(model, plan).kept == 1.0
    assert result.last_loss < 0.9 * result.first_loss
    # Both round to FP8, with scales of another grain.
    assert result.first_loss == pytest.approx(other.first_loss, rel=0.02)
    assert result.last_loss == pytest.approx(other.last_loss, rel=0.05)
    assert result.eval_loss == pytest.approx(other.eval_loss, rel=0.05)


def test_full_tuning_runs_linear_by_linear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result, model, plan, _ = fused_run(tmp_path / "torch", tuner="full")
    assert "run unfused" in caplog.text
    assert measure_coverage(model, plan).kept == 1.0
    assert result.last_loss < result.first_loss

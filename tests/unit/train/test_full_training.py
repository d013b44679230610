"""Full fine-tuning of BF16 weights on FP32 masters, through the training loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import plan_for, tiny_llama
from safetensors.torch import load_file
from train_kit import make_config, train

from swiftfp8.config.schema import OptimConfig
from swiftfp8.inject import inject_precision
from swiftfp8.plan import Plan, RecipeOptions
from swiftfp8.train.metrics import read_log


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def bf16_model(*, masters: bool = True, fp8: bool = False) -> tuple[Any, Plan]:
    model = tiny_llama(hidden=64, dtype=torch.bfloat16)
    plan = plan_for(
        model,
        recipe=RecipeOptions(recipe="fp8_current") if fp8 else None,
        backend="emulated" if fp8 else None,
        tuner="full",
        compute_dtype="bf16",
    )
    plan = replace(plan, master_weights=masters)
    return inject_precision(model, plan, "cpu"), plan


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock."""
    timed = ("time", "tokens_per_second", "data_wait_ms", "peak_memory_gib")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_log(run_dir)]


def small_steps(**options: Any) -> Any:
    """A rate at which plain BF16 would lose most updates."""
    optim = {"lr_scheduler_type": "cosine", **options.pop("optim", {})}
    base = {"max_steps": 8, "learning_rate": 2e-5, "weight_decay": 0.1, "warmup_ratio": 0.25}
    return make_config(**(base | options), optim=OptimConfig(**optim))


def optimizer_state(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / "optimizer.pt", weights_only=True)


@pytest.mark.parametrize(
    ("fp8", "name", "moments"),
    [
        (False, "adamw_torch", "fp32"),
        (True, "adamw_torch", "fp32"),
        (False, "adamw_torch_fused", "fp32"),
        (False, "adamw_torch", "bf16"),
    ],
)
def test_an_interrupted_run_goes_on_exactly(tmp_path, fp8, name, moments):
    config = small_steps(optim={"name": name}, train={"save_steps": 4})

    def planned() -> tuple[Any, Plan]:
        model, plan = bf16_model(fp8=fp8)
        return model, replace(plan, state_dtype=moments)

    whole, _ = train(tmp_path / "whole", config, model=planned())
    parts = tmp_path / "parts"
    train(parts, config, model=planned())
    _, shown = train(parts, config, model=planned(), resume=parts / "checkpoint-4")
    assert "resuming at step 4" in shown and "masters" not in shown
    assert lines(parts) == lines(tmp_path / "whole")
    first, second = whole.last_checkpoint, parts / "checkpoint-8"
    weights, again = (load_file(path / "model.safetensors") for path in (first, second))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    states = [optimizer_state(path)["state"] for path in (first, second)]
    for index, values in states[0].items():
        assert values["remainder"].dtype == torch.int16
        assert values["remainder"].count_nonzero() > 0
        dtype = torch.bfloat16 if moments == "bf16" else torch.float32
        assert values["exp_avg"].dtype == values["exp_avg_sq"].dtype == dtype
        for key, value in values.items():
            assert torch.equal(value, states[1][index][key]), key


def test_norms_and_biases_keep_out_of_weight_decay(tmp_path):
    result, _ = train(tmp_path, small_steps(max_steps=1), model=bf16_model())
    groups = optimizer_state(result.last_checkpoint)["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    # Two layers of seven linears, embedding and head; two norms a layer and the last one.
    assert [len(group["params"]) for group in groups] == [16, 5]


def test_the_norms_of_a_bf16_model_are_trained(tmp_path):
    """They are about 1, so a step of 2e-5 is far below half a BF16 step."""
    result, _ = train(tmp_path / "masters", small_steps(), model=bf16_model())
    without, _ = train(tmp_path / "plain", small_steps(), model=bf16_model(masters=False))
    norms = optimizer_state(result.last_checkpoint)
    indices = norms["param_groups"][1]["params"]
    assert all((norms["state"][i]["remainder"] != 0).float().mean() > 0.99 for i in indices)
    plain = load_file(without.last_checkpoint / "model.safetensors")
    assert all((tensor == 1).all() for name, tensor in plain.items() if "norm" in name)


def test_a_checkpoint_without_masters_starts_them_and_says_so(tmp_path):
    train(tmp_path, small_steps(max_steps=4), model=bf16_model(masters=False))
    result, shown = train(tmp_path, small_steps(), model=bf16_model(), resume=tmp_path)
    assert "no FP32 masters: they begin at its BF16 weights" in shown
    assert result.steps == 8
    states = optimizer_state(result.last_checkpoint)["state"].values()
    assert all(values["remainder"].count_nonzero() > 0 for values in states)


def test_masters_that_are_switched_off_are_dropped_with_a_word(tmp_path):
    train(tmp_path, small_steps(max_steps=4), model=bf16_model())
    result, shown = train(tmp_path, small_steps(), model=bf16_model(masters=False), resume=tmp_path)
    assert "masters are dropped" in shown
    states = optimizer_state(result.last_checkpoint)["state"].values()
    assert not any("remainder" in values for values in states)

"""A run goes on in another precision, or with other options, and says so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from model_kit import plan_for, tiny_llama
from train_kit import make_config, make_rows, train

from swiftfp8.config.schema import OptimConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.inject import inject_precision
from swiftfp8.plan import RecipeOptions
from swiftfp8.train.metrics import read_log

STEPS, HALF = 100, 50


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def injected(recipe: str | None, tuner: str = "lora"):
    options = None if recipe is None else RecipeOptions(recipe=recipe)
    model = tiny_llama(hidden=128, layers=1)
    backend = None if recipe is None else "emulated"
    plan = plan_for(model, recipe=options, backend=backend, tuner=tuner, compute_dtype="bf16")
    plan = replace(plan, asked_dtype="fp8" if recipe else "bf16")
    torch.manual_seed(7)
    model = model.to(torch.bfloat16)
    return inject_precision(model, plan, "cpu"), plan


def mean_end(run_dir) -> float:
    losses = [line["loss"] for line in read_log(run_dir) if "loss" in line]
    return sum(losses[-5:]) / 5


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run in each precision, with its checkpoint at half way; each is trained once."""
    torch.set_num_threads(1)
    home, done = tmp_path_factory.mktemp("whole"), {}

    def run(recipe):
        if recipe not in done:
            folder = home / str(recipe)
            train(folder, job(), rows=make_rows(8), model=injected(recipe))
            done[recipe] = folder
        return done[recipe]

    return run


def job(**options):
    options = {"learning_rate": 5e-3, "max_steps": STEPS, **options}
    return make_config(train={"save_steps": HALF, "save_total_limit": 5}, **options)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("fp8_current", None, "dtype fp8 -> bf16, recipe fp8_current -> none, backend emulated"),
        (None, "fp8_current", "dtype bf16 -> fp8, recipe none -> fp8_current"),
        ("fp8_current", "fp8_block", "recipe fp8_current -> fp8_block"),
        ("fp8_delayed", "fp8_current", "recipe fp8_delayed -> fp8_current"),
    ],
)
def test_another_precision_ends_where_the_uninterrupted_run_does(
    tmp_path, uninterrupted, before, after, said
):
    whole = uninterrupted(before)
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    start = tmp_path / "run" / f"checkpoint-{HALF}"
    result, shown = train(
        tmp_path / "run", job(), rows=make_rows(8), model=injected(after), resume=start
    )
    assert f"changed since the checkpoint, precision: {said}" in shown
    assert ("delayed scaling's history is not used" in shown) == (before == "fp8_delayed")
    assert result.steps == STEPS
    assert mean_end(tmp_path / "run") == pytest.approx(mean_end(whole), rel=0.01)


def test_the_same_precision_is_exact_and_nothing_is_said_to_change(tmp_path, uninterrupted):
    whole = uninterrupted("fp8_current")
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    start = tmp_path / "run" / f"checkpoint-{HALF}"
    again = injected("fp8_current")
    _, shown = train(tmp_path / "run", job(), rows=make_rows(8), model=again, resume=start)
    assert "changed" not in shown
    pick = [(line["step"], line["loss"]) for line in read_log(tmp_path / "run")]
    assert pick == [(line["step"], line["loss"]) for line in read_log(whole)]


def test_another_learning_rate_and_other_options_are_applied_and_said(tmp_path):
    rows = make_rows(8)
    first = make_config(max_steps=8, train={"save_steps": 4, "save_total_limit": 5})
    train(tmp_path, first, rows=rows)
    slower = replace(first, learning_rate=1e-3, optim=OptimConfig(adam_beta2=0.9))
    _, shown = train(tmp_path, slower, rows=rows, resume=tmp_path / "checkpoint-4")
    assert "options: learning_rate 0.002 -> 0.001, optim.adam_beta2 0.95 -> 0.9" in shown
    rates = {line["step"]: line["learning_rate"] for line in read_log(tmp_path)}
    train(tmp_path / "fresh", slower, rows=rows)
    expected = {line["step"]: line["learning_rate"] for line in read_log(tmp_path / "fresh")}
    assert {s: r for s, r in rates.items() if s > 4} == {s: expected[s] for s in range(5, 9)}
    saved = torch.load(tmp_path / "checkpoint-8" / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["betas"] == (0.9, 0.9)
    manifest = json.loads((tmp_path / "checkpoint-8" / "swiftfp8.json").read_text())
    assert manifest["job"]["options"]["learning_rate"] == 1e-3


def test_other_options_that_leave_nothing_to_train_are_refused(tmp_path):
    rows = make_rows(8)
    config = make_config(max_steps=4)
    train(tmp_path, config, rows=rows)
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(SwiftFP8Error) as caught:
        other = replace(config, max_steps=3, learning_rate=1.0)
        train(tmp_path, other, rows=rows, resume=tmp_path)
    assert "max_steps 4 -> 3" in str(caught.value) and "learning_rate" in str(caught.value)
    assert (tmp_path / "result.json").read_bytes() == before
    _, shown = train(tmp_path, config, rows=rows, resume=tmp_path)  # the same job: only said
    assert "nothing is left to train" in shown


def test_an_fp16_scaler_is_left_behind_by_other_precisions(tmp_path):
    rows = make_rows(8)
    config = make_config(max_steps=4, train={"save_steps": 2, "save_total_limit": 5})
    train(tmp_path, config, rows=rows)
    torch.save({"scale": 2.0}, tmp_path / "checkpoint-2" / "scaler.pt")
    result, _ = train(tmp_path, config, rows=rows, resume=tmp_path / "checkpoint-2")
    assert result.steps == 4

"""tuner=freeze: what the plan trains, what then moves, and what is saved."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from model_kit import plan_for as plan_by_hand
from model_kit import tiny_llama
from peft import PeftModel
from plan_kit import plan_for, qwen_7b
from train_kit import make_config, make_rows, train

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.merge import load_adapter
from swiftfp8.freezing import is_below
from swiftfp8.fusion import TRAINED
from swiftfp8.inject import inject_precision, precision_linears
from swiftfp8.plan import RecipeOptions
from swiftfp8.precision import torch_native
from swiftfp8.train.metrics import read_log

LAST = "model.layers.1"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_the_plan_trains_the_last_layers_and_named_linears():
    options = {"last_layers": 2, "modules": ["layers.0.mlp.*", "lm_head"]}
    plan = plan_for("h200", qwen_7b(), tuner="freeze", freeze=options)
    mlp = [f"model.layers.0.mlp.{part}_proj" for part in ("down", "gate", "up")]
    assert set(plan.trained) == {"lm_head", *mlp, "model.layers.26", "model.layers.27"}
    trained = {layer.name for layer in plan.layers if layer.trainable}
    assert {name for name in trained if not is_below(name, plan.trained)} == set()
    assert len(trained) == 2 * 7 + 3 + 1
    assert {x.precision for x in plan.layers if x.name.endswith("proj")} == {"fp8_current"}
    assert plan.lora is None and plan.master_weights
    assert (plan.fusion.layers, plan.fusion.reason) == (28 - 3, TRAINED)


def test_its_memory_lies_between_loras_and_full_tunings():
    def states(**options) -> tuple[float, float]:
        memory = plan_for("h200", qwen_7b(), **options).memory
        return memory.optimizer, memory.total

    lora, part = states(), states(tuner="freeze")
    whole = states(tuner="full")
    assert lora[0] < part[0] < whole[0] and lora[1] < part[1] < whole[1]
    linears = [x for x in qwen_7b().linears if x.layer is not None]
    share = sum(x.in_features * x.out_features for x in linears) * 2 / 28
    assert part[0] == pytest.approx(10 * share / 2**30)  # two moments and a remainder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"freeze": {"last_layers": 0}}, "has nothing to train"),
        ({"freeze": {"last_layers": 99}}, "fewer than 99"),
        ({"freeze": {"modules": ["qproj"]}}, "did you mean q_proj"),
        ({"freeze": {"modules": ["lm_head"]}}, "is the embedding's too"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is for LoRA"),
        ({"task": "dpo"}, "which tuner=freeze changes"),
    ],
)
def test_what_cannot_be_frozen_or_trained_is_refused(options, said):
    with pytest.raises(SwiftFP8Error) as caught:
        plan_for("h200", tuner="freeze", **options)
    assert said in str(caught.value)


def job(backend: str | None):
    """A tiny model of which the last layer is trained."""
    model = tiny_llama(hidden=128)
    recipe = RecipeOptions(recipe="fp8_current") if backend else None
    plan = plan_by_hand(model, recipe=recipe, backend=backend, tuner="freeze", fused_loss=False)
    layers = tuple(replace(x, trainable=is_below(x.name, (LAST,))) for x in plan.layers)
    plan = replace(plan, layers=layers, trained=(LAST,))
    if backend == "torch":
        plan = replace(plan, fusion=replace(plan.fusion, layers=1))
    return inject_precision(model, plan, "cpu"), plan


@pytest.mark.parametrize("backend", [None, "emulated", "torch"])
def test_only_the_chosen_layer_moves_and_a_resume_is_exact(tmp_path, monkeypatch, backend):
    monkeypatch.setattr(torch_native, "available", lambda: None)
    config = make_config(
        max_steps=6, learning_rate=1e-2, train={"save_steps": 3, "save_total_limit": 5}
    )
    model, plan = job(backend)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(tmp_path / "whole", config, model=(model, plan))
    moved = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved == {name for name in before if name.startswith(f"{LAST}.")}
    held = {
        name
        for name, module in precision_linears(model)
        if "weight_bits" in dict(module.named_buffers())
    }
    assert len(held) == (7 if backend else 0)  # the frozen layer's, in FP8 alone
    losses = [line["loss"] for line in read_log(tmp_path / "whole")]
    assert losses[-1] < losses[0]
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    start = tmp_path / "again" / "checkpoint-3"
    train(tmp_path / "again", config, model=job(backend), resume=start)
    assert [line["loss"] for line in read_log(tmp_path / "again")] == losses


def test_its_checkpoint_is_an_adapter_that_plain_peft_and_the_merge_read(tmp_path):
    model, plan = job("emulated")
    train(tmp_path, make_config(max_steps=2, learning_rate=1e-2), model=(model, plan))
    adapter = load_adapter(tmp_path / "last")
    own = dict(model.named_parameters())
    assert set(adapter.replaced) == {n for n in own if n.startswith(f"{LAST}.")}
    merged = PeftModel.from_pretrained(tiny_llama(hidden=128), tmp_path / "last").merge_and_unload()
    for name, tensor in adapter.replaced.items():
        assert torch.equal(tensor, own[name].detach())
        assert torch.equal(merged.get_parameter(name), tensor)
    with pytest.raises(SwiftFP8Error, match="trained is"):
        other = replace(plan, trained=("model.layers.0",))
        train(
            tmp_path,
            make_config(max_steps=9),
            rows=make_rows(),
            model=(model, other),
            resume=tmp_path,
        )

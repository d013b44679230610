"""Optimizers, their groups, schedules, noise and early ends, on a tiny model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from model_kit import tiny_llama
from peft import PeftModel
from test_full_training import bf16_model
from train_kit import make_config, make_model, make_rows, train

from swiftfp8.config.schema import OptimConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.merge import load_adapter
from swiftfp8.train.metrics import read_log
from swiftfp8.train.optimizers import Lion, parameter_groups


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def losses(run_dir) -> list[float]:
    return [line["loss"] for line in read_log(run_dir) if "loss" in line]


def test_lion_steps_as_its_paper_says():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    expected, momentum = weight.detach().clone(), torch.zeros(4, 3, dtype=torch.float64)
    optimizer = Lion([weight], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(5):
        gradient = torch.randn(4, 3, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        expected = expected - 0.01 * (update + 0.1 * expected)
        momentum = 0.99 * momentum + 0.01 * gradient
    assert torch.allclose(weight.detach(), expected)


@pytest.mark.parametrize("name", ["lion", "muon", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_other_optimizers_learn_and_resume_exactly(tmp_path, name, tuner):
    if name == "adamw_8bit":  # its later versions run on a CPU too
        pytest.importorskip("bitsandbytes", "0.50")
    rate = {"lion": 1e-3, "muon": 1e-2, "adafactor": 1e-2, "adamw_8bit": 2e-3}[name]
    optim = OptimConfig(name=name, lr_scheduler_type="constant")
    config = make_config(
        max_steps=8,
        learning_rate=rate,
        weight_decay=0.01,
        optim=optim,
        train={"save_steps": 4, "save_total_limit": 5},
    )
    train(tmp_path / "whole", config, tuner=tuner)
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    train(tmp_path / "again", config, tuner=tuner, resume=tmp_path / "again" / "checkpoint-4")
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    with pytest.raises(SwiftFP8Error, match="optimizer is None, was"):
        train(tmp_path / "again", make_config(max_steps=20), tuner=tuner, resume=tmp_path / "again")


@pytest.mark.parametrize("name", ["lion", "muon", "adafactor", "adamw_torch"])
def test_bf16_weights_without_masters_resume_exactly(tmp_path, name):
    """torch loads states in their weight's dtype, but Adafactor's are FP32 beside BF16 weights."""
    optim = OptimConfig(name=name, lr_scheduler_type="constant", master_weights=False)
    config = make_config(
        max_steps=8,
        learning_rate=1e-3,
        optim=optim,
        train={"save_steps": 4, "save_total_limit": 5},
    )
    train(tmp_path / "whole", config, model=bf16_model(masters=False))
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    start = tmp_path / "again" / "checkpoint-4"
    train(tmp_path / "again", config, model=bf16_model(masters=False), resume=start)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")


def test_muon_takes_the_matrices_of_layers_and_nothing_else():
    model = tiny_llama(hidden=64)
    options = {"weight_decay": 0.1, "rate": 1.0, "plus": 1.0, "muon": True}
    groups = parameter_groups(model, set(), **options)
    names = {id(p): n for n, p in model.named_parameters()}
    by_muon = {names[id(p)] for g in groups if g["muon"] for p in g["params"]}
    assert by_muon == {n for n in names.values() if ".layers." in n and "norm" not in n}


def test_lora_plus_gives_b_a_rate_of_its_own(tmp_path):
    model, plan = make_model()
    plan = replace(plan, lora=replace(plan.lora, plus_ratio=16.0))
    config = make_config(max_steps=2, optim=OptimConfig(lr_scheduler_type="constant"))
    train(tmp_path, config, model=(model, plan))
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    rates = sorted(group["lr"] for group in saved["param_groups"])
    assert rates == pytest.approx([2e-3, 3.2e-2])
    assert read_log(tmp_path)[0]["learning_rate"] == pytest.approx(2e-3)


def test_ranks_by_pattern_and_saved_modules_load_in_plain_peft_and_are_merged(tmp_path):
    _, plan = make_model()
    lora = replace(
        plan.lora,
        init="gaussian",
        rank_pattern=(("down_proj", 4), (r"layers\.0\.self_attn\.q_proj", 2)),
        alpha_pattern=(("down_proj", 8.0),),
        modules_to_save=("lm_head",),
    )
    train(tmp_path, make_config(max_steps=3), model=make_model(lora=lora))
    folder = tmp_path / "last"
    adapter = load_adapter(folder)
    ranks = {name: update.a_RK.shape[0] for name, update in adapter.updates.items()}
    assert ranks["model.layers.0.self_attn.q_proj.weight"] == 2
    assert ranks["model.layers.1.self_attn.q_proj.weight"] == 8
    assert ranks["model.layers.1.mlp.down_proj.weight"] == 4
    assert set(adapter.replaced) == {"lm_head.weight"}
    base = tiny_llama(hidden=64)
    before = base.lm_head.weight.detach().clone()
    merged = PeftModel.from_pretrained(base, folder).merge_and_unload()
    weights = dict(tiny_llama(hidden=64).named_parameters())
    for name, update in adapter.updates.items():
        ours = weights[name] + update.rows(0, weights[name].shape[0])
        assert torch.allclose(merged.get_parameter(name), ours, atol=1e-6)
    assert torch.equal(merged.lm_head.weight, adapter.replaced["lm_head.weight"])
    assert not torch.equal(merged.lm_head.weight, before)


def test_warmup_stable_decay_has_its_three_parts(tmp_path):
    optim = OptimConfig(lr_scheduler_type="wsd", decay_ratio=0.4, min_lr_ratio=0.5)
    train(tmp_path, make_config(max_steps=10, warmup_ratio=0.2, optim=optim))
    rates = [line["learning_rate"] / 2e-3 for line in read_log(tmp_path)]
    assert rates[2:7] == pytest.approx([1.0] * 5)
    assert rates[1] < 1.0
    assert all(a > b >= 0.5 for a, b in pairwise(rates[6:]))


def test_noise_on_embeddings_is_for_training_only(tmp_path):
    rows = make_rows(8, 4)
    train(tmp_path / "plain", make_config(max_steps=1, learning_rate=1e-9), rows=rows)
    noisy = make_config(max_steps=1, learning_rate=1e-9, neftune_noise_alpha=50)
    train(tmp_path / "noisy", noisy, rows=rows)
    assert losses(tmp_path / "noisy") != losses(tmp_path / "plain")
    evaluated = [
        next(line["eval_loss"] for line in read_log(tmp_path / name) if "eval_loss" in line)
        for name in ("plain", "noisy")
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)


def test_a_run_whose_evaluations_get_no_better_ends_early(tmp_path):
    config = make_config(
        max_steps=40,
        learning_rate=0.3,  # it only gets worse
        train={"eval_steps": 1, "early_stopping_patience": 3},
    )
    result, shown = train(tmp_path, config, rows=make_rows(8, 4))
    found = [line["eval_loss"] for line in read_log(tmp_path) if "eval_loss" in line]
    assert len(found) - 1 - found.index(min(found)) == 3
    assert result.steps == len(found) < 40
    assert f"stopped early at step {result.steps}" in shown
    assert (tmp_path / f"checkpoint-{result.steps}").is_dir()


def test_the_count_of_evaluations_goes_on_in_another_directory(tmp_path):
    config = make_config(
        max_steps=40,
        learning_rate=0.3,
        train={
            "eval_steps": 1,
            "save_steps": 1,
            "save_total_limit": 40,
            "early_stopping_patience": 3,
        },
    )
    whole, _ = train(tmp_path / "whole", config, rows=make_rows(8, 4))
    before = tmp_path / "whole" / f"checkpoint-{whole.steps - 1}"
    shutil.copytree(before, tmp_path / "copied" / before.name)
    resume = tmp_path / "copied" / before.name
    resumed, shown = train(tmp_path / "other", config, rows=make_rows(8, 4), resume=resume)
    assert resumed.steps == whole.steps
    assert "in 3 evaluations" in shown

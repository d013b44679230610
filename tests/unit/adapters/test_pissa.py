"""PiSSA: the model begins as it was, and what is saved is an adapter of the base on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from model_kit import batch, plan_for, tiny_llama
from peft import PeftModel
from torch import nn
from train_kit import make_config, make_model, train

from swiftfp8.adapters.pissa import take_principal
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.merge import load_adapter
from swiftfp8.inject import inject_precision
from swiftfp8.plan import RecipeOptions
from swiftfp8.train.metrics import read_log

PATTERNS = {"rank_pattern": (("down_proj", 4),), "alpha_pattern": (("down_proj", 3.0),)}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pissa(plan, **changes):
    return replace(plan, lora=replace(plan.lora, init="pissa", **changes))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=batch()["input_ids"]).logits


@pytest.mark.parametrize("shape", [(48, 20), (20, 48), (32, 32)])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_principal_part_is_the_best_of_its_rank(shape, rslora):
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0])
    weight = linear.weight.detach().clone()
    lora = replace(plan_for(tiny_llama(), recipe=None).lora, rank=5, alpha=7.0, use_rslora=rslora)
    a, b = take_principal(linear, "x", lora)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    scaling = 7.0 / (5**0.5 if rslora else 5)
    assert torch.allclose(scaling * (b @ a), (u[:, :5] * s[:5]) @ v[:5], atol=1e-5)
    assert torch.allclose(linear.weight + scaling * (b @ a), weight, atol=1e-6)
    assert a.norm() == pytest.approx(b.norm().item(), rel=1e-4)  # each has the half of Σ


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, PATTERNS])
def test_it_begins_as_the_model_and_plain_peft_reads_what_was_trained(tmp_path, changes):
    plain = logits(tiny_llama(hidden=64))
    plan = pissa(make_model()[1], **changes)
    model = inject_precision(tiny_llama(hidden=64), plan, "cpu")
    assert torch.allclose(logits(model), plain, atol=1e-5)
    assert not torch.allclose(_base_alone(model), plain, atol=1e-2)  # it lacks the largest part
    train(tmp_path, make_config(max_steps=3), model=(model, plan))
    trained = logits(model)
    assert not torch.allclose(trained, plain, atol=1e-3)
    settings = json.loads((tmp_path / "last" / "adapter_config.json").read_text())
    assert settings["r"] == 16 and settings["init_lora_weights"] is True
    loaded = PeftModel.from_pretrained(tiny_llama(hidden=64), tmp_path / "last")
    assert torch.allclose(logits(loaded), trained, atol=1e-5)
    weights = dict(tiny_llama(hidden=64).named_parameters())
    merged = loaded.merge_and_unload()
    for name, update in load_adapter(tmp_path / "last").updates.items():
        ours = weights[name] + update.rows(0, weights[name].shape[0])
        assert torch.allclose(merged.get_parameter(name), ours, atol=1e-6)


def _base_alone(model) -> torch.Tensor:
    with model.disable_adapter():
        return logits(model)


def test_an_fp8_base_rounds_only_the_rest():
    def spiked():
        model = tiny_llama(hidden=64)
        for module in model.modules():
            if isinstance(module, nn.Linear) and module.out_features != 256:
                torch.manual_seed(module.out_features)
                u, v = torch.randn(module.out_features, 1), torch.randn(1, module.in_features)
                module.weight.data += 0.05 * u @ v
        return model

    exact = logits(spiked())
    plan = plan_for(spiked(), recipe=RecipeOptions(recipe="fp8_current"), rank=2)

    def error(plan):
        torch.manual_seed(0)
        model = inject_precision(spiked(), plan, "cpu")
        for _, module in model.named_modules():
            if hasattr(module, "enabled"):
                module.enabled = False  # weights stay in FP8, inputs don't: the weights' error
        return (logits(model) - exact).norm()

    assert error(pissa(plan)) < 0.6 * error(plan)


def test_a_resume_is_exact_and_another_beginning_is_refused(tmp_path):
    config = make_config(max_steps=6, train={"save_steps": 3, "save_total_limit": 9})
    plan = pissa(make_model(fp8=True)[1])

    def fresh():
        return inject_precision(tiny_llama(hidden=64), plan, "cpu"), plan

    train(tmp_path / "whole", config, model=fresh())
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    start = tmp_path / "again" / "checkpoint-3"
    train(tmp_path / "again", config, model=fresh(), resume=start)
    found, wanted = (
        [line["loss"] for line in read_log(tmp_path / name) if "loss" in line]
        for name in ("again", "whole")
    )
    assert found == wanted
    with pytest.raises(SwiftFP8Error, match="init_lora is None, was pissa"):
        train(tmp_path / "other", config, model=make_model(fp8=True), resume=start)

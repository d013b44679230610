"""DoRA: PEFT's numbers on a plain base, the same formula on a base in FP8, exact resume."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from model_kit import batch, plan_for, tiny_llama, tiny_qwen2
from peft import PeftModel
from train_kit import make_config, make_model, train

from swiftfp8.adapters.lora import LoraPrecisionLinear
from swiftfp8.export.checkpoint_io import CheckpointReader
from swiftfp8.export.merge import MergedCheckpoint, load_adapter
from swiftfp8.inject import inject_precision
from swiftfp8.plan import RecipeOptions
from swiftfp8.precision import torch_native
from swiftfp8.train.metrics import read_log


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(torch_native, "available", lambda: None)


def adapted(model, backend: str | None):
    recipe = RecipeOptions(recipe="fp8_current") if backend else None
    plan = plan_for(model, recipe=recipe, backend=backend, fused_loss=False)
    plan = replace(plan, lora=replace(plan.lora, use_dora=True))
    return inject_precision(model, replace(plan, fusion=replace(plan.fusion, layers=0)), "cpu")


def shake(model) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))


def test_it_is_pefts_dora_where_nothing_is_in_fp8(tmp_path):
    ours = adapted(tiny_qwen2(), None)  # q, k and v have biases, which are not scaled
    shake(ours)
    ours.save_pretrained(tmp_path)
    pefts = PeftModel.from_pretrained(tiny_qwen2(), tmp_path, is_trainable=True)
    outputs = [model(**batch()) for model in (ours, pefts)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.loss.backward()
    theirs = dict(pefts.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("backend", ["emulated", "torch"])
def test_on_fp8_it_goes_by_the_dequantized_weight(backend):
    model = adapted(tiny_llama(), backend)
    layers = [module for module in model.modules() if isinstance(module, LoraPrecisionLinear)]
    layer, x = layers[0], torch.randn(16, 128)
    base = layer.get_base_layer()
    torch.testing.assert_close(layer(x), base(x))  # B is zero, and the lengths are the rows' own
    shake(model)
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    norm = (base.dequantize() + 2.0 * b @ a).norm(dim=1)
    lengths = layer.lora_magnitude_vector.default.weight
    expected = (base(x) + 2.0 * x @ a.t() @ b.t()) * lengths / norm
    # The torch backend multiplies LoRA's inputs as it rounded them.
    error = (layer(x) - expected).norm() / expected.norm()
    assert error < (1e-5 if backend == "emulated" else 0.02)


def test_a_row_of_zeros_stays_one(tmp_path):
    """Padded weights have such rows: a length over itself would be 0 / 0."""
    base = tiny_llama()
    with torch.no_grad():
        base.model.layers[0].mlp.up_proj.weight[3] = 0
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, None)
    loss = model(**batch()).loss
    loss.backward()
    assert torch.isfinite(loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)
    model.save_pretrained(tmp_path / "adapter")
    reader = CheckpointReader(tmp_path / "base")
    merged = MergedCheckpoint(reader, load_adapter(tmp_path / "adapter"))
    rows = merged.rows("model.layers.0.mlp.up_proj.weight")
    assert torch.isfinite(rows).all() and not rows[3].any()


def test_it_trains_lengths_too_and_resumes_exactly(tmp_path):
    _, plan = make_model(fp8=True)
    lora = replace(plan.lora, use_dora=True)
    config = make_config(max_steps=6, train={"save_steps": 3, "save_total_limit": 5})
    model, plan = make_model(fp8=True, lora=lora)
    lengths = {n: p.detach().clone() for n, p in model.named_parameters() if "magnitude" in n}
    train(tmp_path / "whole", config, model=(model, plan))
    assert len(lengths) == 14
    assert not any(torch.equal(model.get_parameter(n).detach(), p) for n, p in lengths.items())
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    start = tmp_path / "again" / "checkpoint-3"
    train(tmp_path / "again", config, model=make_model(fp8=True, lora=lora), resume=start)
    pick = [[x["loss"] for x in read_log(tmp_path / name)] for name in ("whole", "again")]
    assert pick[0] == pick[1]

"""Where LoRA goes, what it is called, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_kit import batch, plan_for, tiny_llama
from safetensors.torch import load_file

from swiftfp8.adapters.lora import LoraPrecisionLinear, compact_targets, load_adapter
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.inject import forward_context, inject_precision
from swiftfp8.plan import RecipeOptions

CURRENT = RecipeOptions(recipe="fp8_current")
MODULES = ["lm_head", "model.embed_tokens"] + [
    f"model.layers.{i}.{part}"
    for i in range(2)
    for part in ("self_attn", "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.gate")
]


def test_targets_shrink_to_last_parts_where_that_selects_the_same() -> None:
    every = [
        f"model.layers.{i}.self_attn.{part}" for i in range(2) for part in ("q_proj", "v_proj")
    ]
    assert compact_targets(every, MODULES) == ["q_proj", "v_proj"]


def test_a_layer_left_out_keeps_the_others_under_their_full_names() -> None:
    targets = ["model.layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
    targets += ["model.layers.1.mlp.up_proj"]
    assert compact_targets(targets, MODULES) == ["model.layers.1.self_attn.q_proj", "up_proj"]


def test_only_the_adapter_is_trained_and_in_float32() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    targets = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    plan = plan_for(model, recipe=CURRENT, targets=targets, high=("0.self_attn.q_proj",))
    adapted = inject_precision(model, plan, "cpu")
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert set(trained) == {
        f"base_model.model.{target}.lora_{side}.default.weight"
        for target in targets
        for side in "AB"
    }
    assert all(parameter.dtype == torch.float32 for parameter in trained.values())


@pytest.mark.parametrize("rslora", [False, True])
def test_scaling_and_formula(rslora: bool) -> None:
    model = tiny_llama()
    plan = plan_for(model, recipe=None, backend=None, rank=4)
    object.__setattr__(plan.lora, "use_rslora", rslora)
    layer = inject_precision(model, plan, "cpu").base_model.model.model.layers[0].mlp.up_proj
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    torch.nn.init.normal_(b)
    x = torch.randn(5, 128)
    expected = layer.base_layer(x) + (8.0 / 2.0 if rslora else 2.0) * x @ a.t() @ b.t()
    torch.testing.assert_close(layer(x), expected)


def test_autocast_computes_in_bf16_and_keeps_its_dtype() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    adapted = inject_precision(model, plan_for(model, recipe=CURRENT, high=("q_proj",)), "cpu")
    seen: dict[str, torch.dtype] = {}
    for name, module in adapted.named_modules():
        if isinstance(module, LoraPrecisionLinear):
            module.register_forward_hook(
                lambda module, args, out, name=name: seen.update({name: out.dtype})
            )
    with torch.autocast("cpu", torch.bfloat16):
        loss = adapted(**batch()).loss
    loss.backward()
    assert len(seen) == 14 and set(seen.values()) == {torch.bfloat16}


def test_dropout_acts_on_the_adapter_only_and_only_in_training() -> None:
    model = tiny_llama()
    adapted = inject_precision(model, plan_for(model, recipe=CURRENT, dropout=0.5), "cpu")
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    x = torch.randn(5, 128)
    assert torch.equal(layer.train()(x), layer(x))  # B is zero: nothing to drop
    torch.nn.init.normal_(layer.lora_B.default.weight)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_adapters_can_be_switched_off() -> None:
    model = tiny_llama()
    adapted = inject_precision(model, plan_for(model, recipe=CURRENT), "cpu")
    layer = adapted.base_model.model.model.layers[0].mlp.up_proj
    torch.nn.init.normal_(layer.lora_B.default.weight)
    x = torch.randn(5, 128)
    with adapted.disable_adapter():
        assert torch.equal(layer(x), layer.base_layer(x))
    assert not torch.equal(layer(x), layer.base_layer(x))


def test_files_are_pefts(tmp_path: Path) -> None:
    model = tiny_llama()
    adapted = inject_precision(model, plan_for(model, recipe=CURRENT), "cpu")
    adapted.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 8 and config["lora_alpha"] == 16
    assert set(config["target_modules"]) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 14
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors[name].shape == (8, 128)


def test_a_saved_adapter_is_read_back_exactly(tmp_path: Path) -> None:
    first = tiny_llama()
    adapted = inject_precision(first, plan_for(first, recipe=CURRENT), "cpu")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(tmp_path)
    second = tiny_llama()
    plan = plan_for(second, recipe=CURRENT)
    restored = inject_precision(second, plan, "cpu")
    load_adapter(restored, tmp_path)
    with forward_context(plan):
        assert torch.equal(restored(**batch()).logits, adapted(**batch()).logits)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    inject_precision(model, plan_for(model, recipe=CURRENT), "cpu").save_pretrained(tmp_path)
    other = tiny_llama(layers=1)
    adapted = inject_precision(other, plan_for(other, recipe=CURRENT), "cpu")
    with pytest.raises(SwiftFP8Error, match=r"layers\.1"):
        load_adapter(adapted, tmp_path)
    other = tiny_llama()
    adapted = inject_precision(other, plan_for(other, recipe=CURRENT, rank=4), "cpu")
    with pytest.raises(SwiftFP8Error, match="r=8, not 4"):
        load_adapter(adapted, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10")
    other = tiny_llama()
    adapted = inject_precision(other, plan_for(other, recipe=CURRENT), "cpu")
    with pytest.raises(SwiftFP8Error, match="can't be read"):
        load_adapter(adapted, tmp_path)


def test_an_fp8_base_refuses_to_be_merged_into() -> None:
    model = tiny_llama()
    adapted = inject_precision(model, plan_for(model, recipe=CURRENT), "cpu")
    with pytest.raises(SwiftFP8Error, match="can't be merged"):
        adapted.merge_adapter()

"""What the plan says of LoRA's options, optimizers and learning rates."""

from __future__ import annotations

import re

import pytest
from plan_kit import plan_for, qwen_7b, qwen_half_b

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.fusion import DORA, FLEX, MIXED_LORA

LAYERS = qwen_half_b().num_layers


def refusal(**options) -> str:
    with pytest.raises(SwiftFP8Error) as caught:
        plan_for("h200", **options)
    return str(caught.value)


def test_ranks_by_pattern_reach_the_plan_and_the_memory_estimate():
    pattern = {r"layers\.0\.mlp\.down_proj": 64, "v_proj": 16}
    plan = plan_for("h200", rank_pattern=pattern)
    ranks = {layer.name.removeprefix("model."): layer.lora_rank for layer in plan.layers}
    assert ranks["layers.0.mlp.down_proj"] == 64
    assert ranks["layers.1.mlp.down_proj"] is None
    assert ranks["layers.3.self_attn.v_proj"] == 16
    assert plan.memory.adapters > plan_for("h200").memory.adapters


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"rank_pattern": {"down_proj": 64}}, LAYERS),  # alone on its input
        ({"rank_pattern": {r"layers\.0\.self_attn\.q_proj": 16}}, LAYERS - 1),
        ({"alpha_pattern": {"up_proj": 1.0}}, 0),
        ({"rank_pattern": {"q_proj|k_proj|v_proj": 16}}, LAYERS),
    ],
)
def test_layers_whose_adapters_cannot_be_joined_run_linear_by_linear(options, fused):
    plan = plan_for("h200", precision={"backend": "torch"}, **options)
    assert plan.fusion.layers == fused
    assert plan.fusion.reason == (None if fused == LAYERS else MIXED_LORA)


def test_dora_runs_linear_by_linear_and_says_why():
    plan = plan_for("h200", use_dora=True, precision={"backend": "torch"})
    assert plan.lora.use_dora
    assert (plan.fusion.layers, plan.fusion.reason) == (0, DORA)
    assert plan.memory.workspace > plan_for("h200").memory.workspace


def test_flex_attention_runs_linear_by_linear_and_on_a_gpu_alone():
    flex = {"attn_implementation": "flex_attention"}
    plan = plan_for("h200", precision={"backend": "torch"}, **flex)
    assert (plan.fusion.layers, plan.fusion.reason) == (0, FLEX)
    for kernel in ("flex_attention", "flash_attention_2"):
        with pytest.raises(SwiftFP8Error, match=f"{kernel} can be trained on a GPU only"):
            plan_for("cpu", attn_implementation=kernel)


def test_a_head_that_is_saved_is_trained_whole_in_high_precision():
    plan = plan_for("h200", qwen_7b(), modules_to_save=["lm_head"])
    head = next(layer for layer in plan.layers if layer.name == "lm_head")
    assert (head.precision, head.trainable, head.lora) == ("bf16", True, False)
    assert plan.lora.modules_to_save == ("lm_head",)
    assert not plan.loss.fused
    size = head.in_features * head.out_features * 4 / 2**30
    more = plan.memory.optimizer - plan_for("h200", qwen_7b()).memory.optimizer
    assert more == pytest.approx(2 * size)
    one = "model.layers.0.mlp.down_proj"
    layers = {x.name: x for x in plan_for("h200", modules_to_save=[one]).layers}
    assert "modules_to_save" in layers[one].reason and not layers[one].lora


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank_pattern": {"qproj": 4}}, "fits no linear that has LoRA"),
        ({"alpha_pattern": {"(": 4}}, "no regular expression"),
        ({"init_lora": "pissa", "use_dora": True}, "DoRA measures the rows"),
        ({"init_lora": "pissa", "task": "dpo"}, "the reference is the model with its adapter off"),
        ({"init_lora": "pissa", "lora_rank": 256}, "fewer directions than its LoRA rank"),
        ({"modules_to_save": ["lm_head"]}, "shares its weight with the embedding"),
        ({"modules_to_save": ["embed_tokens"]}, "no linear of this model"),
        (
            {"modules_to_save": ["q_proj"], "target_modules": ["q_proj"]},
            "can't both have LoRA and be trained whole",
        ),
        ({"tuner": "full", "use_dora": True}, "use_dora is for LoRA"),
        ({"tuner": "full", "lora_plus_ratio": 16}, "lora_plus_ratio is for LoRA"),
        ({"train": {"early_stopping_patience": 2}}, "no rows for any"),
        (
            {"train": {"early_stopping_patience": 2, "eval_steps": 0}, "split_dataset_ratio": 0.1},
            "only those at the end",
        ),
        (
            {"train": {"tokens_per_step": 4096}, "gradient_accumulation_steps": 2},
            "a step's size is given twice",
        ),
        ({"task": "dpo", "neftune_noise_alpha": 5}, "reach the reference"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(options, said):
    assert said in refusal(**options)


def test_advice_on_modules_to_save_can_be_taken():
    """Qwen2.5-0.5B's head is its embedding."""
    assert "leave lm_head out, or set tuner=full" in refusal(modules_to_save=["lm_head"])
    advised = re.search(r"such as (\S+);", refusal(modules_to_save=["embed_tokens"]))
    assert advised is not None
    assert plan_for("h200", modules_to_save=[advised[1]]).lora.modules_to_save == (advised[1],)
    with pytest.raises(SwiftFP8Error, match="such as lm_head"):
        plan_for("h200", qwen_7b(), modules_to_save=["embed_tokens"])


def test_a_streams_first_rows_are_evaluations_that_can_end_a_run():
    stop = {"early_stopping_patience": 2}
    stream = {"data": {"streaming": True, "eval_rows": 4}, "max_steps": 9}
    plan_for("h200", train=stop, **stream)
    stream["data"]["eval_rows"] = 0
    assert "set val_dataset or data.eval_rows" in refusal(train=stop, **stream)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 1}, "max_steps=1, and all of that is warm-up (warmup_ratio=0.03), at learn"),
        ({"max_steps": 4, "warmup_ratio": 1.0}, "the last at 75% of learning_rate"),
        ({"max_steps": 1, "warmup_ratio": 0.0}, None),
        ({"max_steps": 1, "optim": {"lr_scheduler_type": "constant"}}, None),
        ({"max_steps": 2}, None),
    ],
)
def test_a_run_that_ends_within_its_warm_up_is_warned_of(options, said):
    warnings = " ".join(plan_for("h200", **options).warnings)
    assert (said in warnings) if said else "warm-up" not in warnings


def test_tokens_per_step_are_counted_as_accumulated_gradients():
    options = {"per_device_train_batch_size": 2, "max_length": 1024, "packing": True}
    plan = plan_for("h200", train={"tokens_per_step": 65536}, **options)
    assert any("train.tokens_per_step=65536" in note for note in plan.notes)
    assert plan.memory == plan_for("h200", gradient_accumulation_steps=4, **options).memory


def test_eight_bit_adamw_without_its_library_is_refused_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr("swiftfp8.tuning.find_spec", lambda name: None)
    said = refusal(optim={"name": "adamw_8bit"})
    assert "pip install bitsandbytes, or set optim.name=adamw_torch" in said
    with pytest.raises(SwiftFP8Error, match="needs a GPU") as caught:
        plan_for("cpu", optim={"name": "adamw_8bit"})
    assert "set optim.name=adamw_torch" in caught.value.fix, "a package would not help"
    monkeypatch.setattr("swiftfp8.tuning.find_spec", lambda name: object())
    plan_for("h200", optim={"name": "adamw_8bit"})
    with pytest.raises(SwiftFP8Error, match="needs a GPU"):
        plan_for("cpu", optim={"name": "adamw_8bit"})


def test_muon_needs_a_torch_that_has_it(monkeypatch):
    monkeypatch.setattr("swiftfp8.tuning.metadata.version", lambda name: "2.8.1+cu128")
    assert "torch 2.8.1+cu128 has no Muon" in refusal(optim={"name": "muon"})


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, "8e-05: tuner=lora, times optim.fp8_lr_scale=0.8 under FP8"),
        ({"dtype": "bf16"}, "0.0001: tuner=lora"),
        ({"tuner": "full", "optim": {"fp8_lr_scale": 1.0}}, "1e-05: tuner=full, times"),
    ],
)
def test_an_automatic_learning_rate_is_said(options, rate):
    notes = plan_for("h200", learning_rate="auto", **options).notes
    assert any(note.startswith(f"learning_rate=auto took {rate}") for note in notes)


def test_the_memory_estimate_follows_the_optimizer(monkeypatch):
    monkeypatch.setattr("swiftfp8.tuning.find_spec", lambda name: object())

    def states(name: str) -> float:
        plan = plan_for("h200", qwen_7b(), tuner="full", optim={"name": name})
        if name != "adamw_torch":
            assert not plan.master_weights
            assert any("without FP32 masters" in note for note in plan.notes)
        return plan.memory.optimizer

    weights = 2 * qwen_7b().total_params / 2**30
    assert states("lion") == pytest.approx(weights)
    assert states("adamw_torch") == pytest.approx(5 * weights)  # with masters
    assert states("adafactor") == 0
    assert states("adamw_8bit") == pytest.approx(weights)  # two bytes, as a BF16 weight has


@pytest.mark.parametrize("tuner", ["lora", "freeze", "full"])
def test_an_average_of_the_weights_takes_four_bytes_a_trained_parameter(tuner):
    plain = plan_for("h200", qwen_7b(), tuner=tuner)
    plan = plan_for("h200", qwen_7b(), tuner=tuner, train={"ema_decay": 0.999})
    states = {"lora": 2, "freeze": 2.5, "full": 2.5}[tuner]  # of four bytes, masters' halves too
    assert plan.memory.optimizer == pytest.approx(plain.memory.optimizer * (1 + 1 / states))
    assert any("train.ema_decay=0.999" in note for note in plan.notes)

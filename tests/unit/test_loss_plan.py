"""Which loss a run gets, whether its head runs in FP8, and the reasons."""

from dataclasses import replace
from typing import Any

import pytest

from swiftfp8.config.schema import Config, TrainConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.hardware import GIB
from swiftfp8.plan import Plan
from tests.plan_kit import plan_for, qwen_7b, qwen_half_b

FP8_HEAD = {"backend": "torch", "head": "fp8"}


def head(plan: Plan) -> Any:
    return next(found for found in plan.layers if found.name == "lm_head")


@pytest.mark.parametrize("hardware", ["h200", "a100", "v100", "cpu"])
@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_every_run_of_a_known_model_fuses_its_loss(hardware: str, tuner: str) -> None:
    plan = plan_for(hardware, tuner=tuner)
    assert plan.loss.fused and "in chunks" in plan.loss.reason


def test_it_can_be_switched_off() -> None:
    plan = plan_for("h200", train={"fused_loss": "off"})
    assert not plan.loss.fused and plan.loss.reason == "train.fused_loss=off"


def test_a_model_whose_logits_are_changed_gets_the_plain_loss() -> None:
    capped = replace(qwen_7b(), unfused_loss="its logits are changed after the head (x)")
    assert plan_for("h200", capped).loss.reason == capped.unfused_loss
    with pytest.raises(SwiftFP8Error, match="changed after the head") as caught:
        plan_for("h200", capped, train={"fused_loss": "on"})
    assert "train.fused_loss=auto" in str(caught.value)


def test_an_unknown_model_is_asked_for_by_name() -> None:
    unknown = replace(qwen_7b(), architecture="NovelForCausalLM")
    plan = plan_for("h200", unknown)
    assert not plan.loss.fused and "train.fused_loss=on" in plan.loss.reason
    assert plan_for("h200", unknown, train={"fused_loss": "on"}).loss.fused


def test_a_head_with_lora_keeps_its_own_loss() -> None:
    plan = plan_for("h200", qwen_7b(), target_modules=["lm_head", "q_proj"])
    assert not plan.loss.fused and plan.loss.reason == "its head has LoRA"


def test_yaml_reads_on_and_off_as_flags() -> None:
    assert TrainConfig(fused_loss=True).fused_loss == "on"  # type: ignore[arg-type]
    assert Config(train={"fused_loss": False}).train.fused_loss == "off"  # type: ignore[arg-type]


def test_the_fused_loss_saves_the_logits() -> None:
    step = {"per_device_train_batch_size": 4, "max_length": 2048}
    plain = plan_for("h200", qwen_7b(), train={"fused_loss": "off"}, **step).memory
    fused = plan_for("h200", qwen_7b(), **step).memory
    assert plain.logits > 10 and fused.logits < 1
    assert fused.largest_micro_batch > plain.largest_micro_batch


def test_an_fp8_head_is_a_layer_like_others() -> None:
    high, fp8 = (plan_for("h200", qwen_7b(), precision=FP8_HEAD | {"head": h}) for h in
                 ("bf16", "fp8"))  # fmt: skip
    assert head(high).precision == "bf16" and "output head" in head(high).reason
    assert head(fp8).precision == "fp8_current" and not fp8.fallbacks
    assert fp8.coverage == 1.0 > high.coverage
    saved = (high.memory.weights - fp8.memory.weights) * GIB
    assert saved == pytest.approx(152064 * 3584)  # untied: a byte a weight
    assert not any("embedding" in note for note in fp8.notes)


def test_a_tied_fp8_head_is_a_copy_and_says_what_it_costs() -> None:
    high, fp8 = (plan_for("h200", qwen_half_b(), precision=FP8_HEAD | {"head": h}) for h in
                 ("bf16", "fp8"))  # fmt: skip
    more = (fp8.memory.weights - high.memory.weights) * GIB
    assert more == pytest.approx(151936 * 896)
    assert any("0.13 GiB more" in note for note in fp8.notes)


@pytest.mark.parametrize(
    ("precision", "train", "reason"),
    [
        ({"backend": "te", "head": "fp8"}, {}, "FP8 is run by te"),
        (FP8_HEAD, {"fused_loss": "off"}, "train.fused_loss=off"),
    ],
)
def test_an_fp8_head_that_cannot_be_had_is_a_fallback(
    precision: dict[str, str], train: dict[str, str], reason: str
) -> None:
    plan = plan_for("h200", precision=precision, train=train)
    (fallback,) = plan.fallbacks
    assert fallback.asked == "precision.head=fp8" and reason in fallback.reason
    assert head(plan).precision == "bf16" and head(plan).reason == fallback.reason
    with pytest.raises(SwiftFP8Error, match=r"precision\.head=fp8 can't be had"):
        plan_for("h200", precision=precision | {"strict": True}, train=train)


def test_without_fp8_there_is_one_fallback_not_two() -> None:
    plan = plan_for("a100", precision=FP8_HEAD)
    assert [fallback.asked for fallback in plan.fallbacks] == ["fp8"]
    assert not plan_for("h200", dtype="bf16", precision=FP8_HEAD).fallbacks


@pytest.mark.parametrize(
    ("options", "why"),
    [({"tuner": "full"}, "is trained"), ({"target_modules": ["lm_head"]}, "has LoRA")],
)
def test_a_trained_head_refuses_fp8(options: dict[str, Any], why: str) -> None:
    with pytest.raises(SwiftFP8Error, match=why):
        plan_for("h200", qwen_7b(), precision=FP8_HEAD, **options)

"""Which engine `precision.backend=auto` takes, under each order of engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from swiftfp8 import engine
from swiftfp8.hardware import parse_hardware
from swiftfp8.models.meta import ModelMeta
from swiftfp8.plan import FP8_RECIPES
from tests.plan_kit import plan_for, qwen_7b

WITHOUT_TE = replace(
    parse_hardware("h200"),
    te_unavailable=dict.fromkeys(FP8_RECIPES, "Transformer Engine is not installed"),
)
WITHOUT_EITHER = replace(WITHOUT_TE, torch_reason="Triton is not installed")
OTHER_FORM = replace(qwen_7b(), unfused_layers="its norms have another form")
UNCOMPILED = {"tuner": "full", "train": {"compile": False}}


@pytest.fixture
def torch_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "AUTO_ENGINES", ("torch", "te"))


def test_the_default_order_is_one_that_is_tested_here() -> None:
    assert engine.AUTO_ENGINES in (("te",), ("torch", "te"))


@pytest.mark.usefixtures("te_alone")
def test_te_alone_is_transformer_engine_or_no_fp8() -> None:
    plan = plan_for("h200", qwen_7b())
    assert plan.backend == "te" and not any("backend=auto" in note for note in plan.notes)
    assert plan_for(WITHOUT_TE, qwen_7b()).backend is None


@pytest.mark.usefixtures("torch_first")
@pytest.mark.parametrize(
    ("hardware", "meta", "options", "backend", "reason"),
    [
        ("h200", qwen_7b(), {}, "torch", "whole decoder layers"),
        ("h100", qwen_7b(), {}, "torch", "whole decoder layers"),
        ("h200", qwen_7b(), {"tuner": "full"}, "torch", "compiles decoder layers"),
        ("h200", qwen_7b(), UNCOMPILED, "te", "train.compile=false"),
        ("h200", OTHER_FORM, {"tuner": "full"}, "te", "norms have another form"),
        ("h200", qwen_7b(), {"lora_dropout": 0.1}, "te", "dropout"),
        ("h200", OTHER_FORM, {}, "te", "norms have another form"),
        ("h200", qwen_7b(), {"precision": {"recipe": "fp8_block"}}, "te", "fp8_current only"),
        ("b200", qwen_7b(), {}, "te", "not measured on NVIDIA B200"),
        ("rtx4090", qwen_7b(), {}, "te", "not measured on NVIDIA RTX 4090"),
        (WITHOUT_TE, qwen_7b(), {}, "torch", "is not installed"),
        (WITHOUT_TE, OTHER_FORM, {}, "torch", "is not installed"),
        (WITHOUT_TE, qwen_7b(), {"tuner": "full"}, "torch", "is not installed"),
    ],
)
def test_with_torch_first_auto_takes_what_the_job_allows(
    hardware: Any, meta: ModelMeta, options: dict[str, Any], backend: str, reason: str
) -> None:
    plan = plan_for(hardware, meta, **options)
    assert plan.backend == backend and not plan.fallbacks
    (note,) = (note for note in plan.notes if "precision.backend=auto took" in note)
    assert reason in note


@pytest.mark.usefixtures("torch_first")
def test_with_torch_first_what_was_asked_for_is_given() -> None:
    for backend in ("te", "torch", "emulated"):
        plan = plan_for("h200", qwen_7b(), precision={"backend": backend})
        assert plan.backend == backend
        assert not any("backend=auto" in note for note in plan.notes)


@pytest.mark.usefixtures("torch_first")
def test_with_neither_the_ladder_goes_down_with_the_reason() -> None:
    plan = plan_for(WITHOUT_EITHER, qwen_7b())
    assert plan.backend is None and "not installed" in plan.fallbacks[0].reason
    for hardware in ("a100", "cpu"):
        assert "8.9" in plan_for(hardware, qwen_7b()).fallbacks[0].reason
        emulated = plan_for(hardware, qwen_7b(), precision={"emulate": True})
        assert emulated.backend == "emulated"


def test_te_first_takes_torch_where_te_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "AUTO_ENGINES", ("te", "torch"))
    assert plan_for("h200", qwen_7b()).backend == "te"
    assert plan_for(WITHOUT_TE, qwen_7b()).backend == "torch"

"""What is recomputed, why, and that it changes nothing but memory."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_kit import batch, tiny_llama, tiny_qwen2
from model_kit import plan_for as plan_by_hand

from swiftfp8.config.schema import Config
from swiftfp8.inject import forward_context, inject_precision
from swiftfp8.plan import RecipeOptions
from swiftfp8.precision import torch_native
from tests.plan_kit import plan_for, qwen_7b

STEP = {"lora_rank": 16, "per_device_train_batch_size": 4, "max_length": 2048}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (True, "full"), (False, "none"), ("true", "full"), ("False", "none"), ("auto", "auto"),
        ("none", "none"), ("selective", "selective"), ("full", "full"),
    ],
)  # fmt: skip
def test_flags_of_old_configurations_are_read(written: Any, meant: str) -> None:
    assert Config(gradient_checkpointing=written).gradient_checkpointing == meant


@pytest.mark.parametrize(
    ("hardware", "backend", "choice"),
    [
        ("h200", "torch", "none"),
        ("x:9.0:28", "torch", "selective"),
        ("l4", "torch", "full"),
        ("h200", "te", "none"),
        ("x:9.0:28", "te", "full"),
    ],
)
def test_auto_takes_the_cheapest_that_fits(hardware: str, backend: str, choice: str) -> None:
    plan = plan_for(hardware, qwen_7b(), precision={"backend": backend}, **STEP)
    assert plan.gradient_checkpointing == choice
    assert plan.memory.total <= plan.memory.available
    assert "it fits" in plan.checkpointing_reason
    for dearer in {"none": [], "selective": ["none"], "full": ["none"]}[choice]:
        assert f"{dearer} would take" in plan.checkpointing_reason
        forced = plan_for(
            hardware, qwen_7b(), precision={"backend": backend}, gradient_checkpointing=dearer,
            **STEP,
        )  # fmt: skip
        assert forced.gradient_checkpointing == dearer
        assert forced.memory.total > forced.memory.available


def test_what_fits_nowhere_is_recomputed_in_full() -> None:
    plan = plan_for("t4", qwen_7b(), **STEP)
    assert plan.gradient_checkpointing == "full"
    assert "can be used" in plan.checkpointing_reason
    assert any("not even one row fits" in note for note in plan.warnings)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"precision": {"backend": "te"}}, "hidden from PyTorch"),
        ({"precision": {"backend": "torch"}, "lora_dropout": 0.1}, "none is fused"),
        ({"precision": {"backend": "torch"}, "tuner": "full"}, "none is fused"),
        (
            {"precision": {"backend": "emulated", "recipe": "fp8_delayed"}},
            "emulated delayed scaling",
        ),
    ],
)
def test_selective_that_cannot_be_had_is_full_with_the_reason(
    options: dict[str, Any], why: str
) -> None:
    plan = plan_for("h200", gradient_checkpointing="selective", **options)
    assert plan.gradient_checkpointing == "full"
    assert why in plan.checkpointing_reason
    assert plan_for("l4", qwen_7b(), **STEP, **options).gradient_checkpointing == "full"


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_each_choice_takes_less_memory(dtype: str) -> None:
    totals = [
        plan_for(
            "h200", qwen_7b(), dtype=dtype, precision={"backend": "torch"},
            gradient_checkpointing=choice, **STEP,
        ).memory.total
        for choice in ("none", "selective", "full")
    ]  # fmt: skip
    assert totals[0] > totals[1] > totals[2]


@pytest.mark.parametrize("backend", [None, "emulated", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_losses_and_gradients_are_equal(
    monkeypatch: pytest.MonkeyPatch, backend: str | None, dtype: torch.dtype, tuner: str
) -> None:
    monkeypatch.setattr(torch_native, "available", lambda: None)
    modes = ["none", "selective", "full"]
    if backend == "torch" and tuner == "full":
        modes.remove("selective")
    results = [one_step(mode, backend, dtype, tuner) for mode in modes]
    for loss, gradients in results[1:]:
        assert loss == results[0][0]
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0][1], strict=True))


def one_step(
    mode: str, backend: str | None, dtype: torch.dtype, tuner: str
) -> tuple[float, list[torch.Tensor]]:
    recipe = RecipeOptions(recipe="fp8_current") if backend else None
    model = tiny_qwen2(dtype=dtype)
    plan = plan_by_hand(
        model, recipe=recipe, backend=backend, tuner=tuner, gradient_checkpointing=mode
    )
    torch.manual_seed(3)
    model = inject_precision(model, plan, "cpu").train()
    low = torch.autocast("cpu", dtype) if dtype == torch.bfloat16 else contextlib.nullcontext()
    with low, forward_context(plan):
        loss = model(**batch(), use_cache=False).loss
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("rank", [8, 16])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_matmuls_run_again_under_full_alone(mode: str, rank: int) -> None:
    """Counted on a linear with LoRA: its base, its A, its B; its rank may be by a pattern."""
    model = tiny_llama(hidden=64)
    plan = plan_by_hand(
        model, recipe=None, backend=None, gradient_checkpointing=mode, targets=(
            "model.layers.0.mlp.up_proj",)
    )  # fmt: skip
    assert plan.lora is not None
    plan = replace(
        plan,
        lora=replace(plan.lora, rank_pattern=(("up_proj", rank),)),
        layers=tuple(replace(x, lora_rank=rank) if x.lora else x for x in plan.layers),
    )
    model = inject_precision(model, plan, "cpu").train()
    counter = _CountMatmuls()
    with counter:
        loss = model(**batch()).loss
        forward = counter.calls
        loss.backward()
    backward = counter.calls - forward
    bare = inject_precision(
        tiny_llama(hidden=64), replace(plan, gradient_checkpointing="none"), "cpu"
    ).train()
    with _CountMatmuls() as other:
        loss = bare(**batch()).loss
        before = other.calls
        loss.backward()
    again = backward - (other.calls - before)
    # Selective: the products of LoRA's A and B alone. (Recomputation stops where it has enough.)
    assert {"none": again == 0, "selective": 0 < again <= 2, "full": again > 8}[mode]


class _CountMatmuls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))

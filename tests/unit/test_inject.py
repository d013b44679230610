"""The plan is obeyed: which linears are replaced, what is trained, counted, saved."""

from __future__ import annotations

import pytest
import torch
from model_kit import batch, plan_for, tiny_llama, tiny_qwen2
from torch import nn

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.inject import (
    count_bytes,
    forward_context,
    inject_precision,
    load_plain_state_dict,
    load_scaling_state,
    measure_coverage,
    plain_state_dict,
    precision_linears,
    reset_coverage,
    scaling_state,
    set_fp8_enabled,
)
from swiftfp8.plan import RecipeOptions

CURRENT = RecipeOptions(recipe="fp8_current")
DELAYED = RecipeOptions(recipe="fp8_delayed", amax_history_len=4)


def step(model: nn.Module, plan, seed: int = 1) -> torch.Tensor:
    model.zero_grad()
    with forward_context(plan):
        loss = model(**batch(seed=seed)).loss
    loss.backward()
    return loss.detach()


def test_layers_left_high_stay_high_and_their_siblings_do_not() -> None:
    model = tiny_llama()
    plan = plan_for(model, recipe=CURRENT, high=("0.self_attn.q_proj", "1.mlp.down_proj"))
    adapted = inject_precision(model, plan, "cpu")
    converted = {name for name, _ in precision_linears(adapted)}
    planned = {layer.name for layer in plan.layers if layer.precision == "fp8_current"}
    assert converted == planned and len(planned) == 12
    left = adapted.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    assert type(left) is nn.Linear
    assert type(adapted.base_model.model.lm_head) is nn.Linear


def test_coverage_is_counted_from_what_ran() -> None:
    model = tiny_llama()
    plan = plan_for(model, recipe=CURRENT)
    adapted = inject_precision(model, plan, "cpu")
    report = measure_coverage(adapted, plan)
    assert report.measured == 0 and set(report.missing.values()) == {"never ran"}
    step(adapted, plan)
    report = measure_coverage(adapted, plan)
    assert report.measured == pytest.approx(plan.coverage) == report.planned
    assert report.kept == 1.0 and report.missing == {}
    set_fp8_enabled(adapted, False)
    step(adapted, plan)
    report = measure_coverage(adapted, plan)
    assert report.kept == pytest.approx(0.5)
    assert report.missing["model.layers.0.mlp.up_proj"] == "1 of 2 passes in high precision"
    set_fp8_enabled(adapted, True)
    reset_coverage(adapted)
    step(adapted, plan)
    assert measure_coverage(adapted, plan).kept == 1.0


def test_coverage_names_a_linear_that_fell_out() -> None:
    model = tiny_llama()
    plan = plan_for(model, recipe=CURRENT, tuner="full")
    full = inject_precision(model, plan, "cpu")
    full.model.layers[0].mlp.up_proj = nn.Linear(128, 256, bias=False)
    step(full, plan)
    report = measure_coverage(full, plan)
    assert report.missing == {"model.layers.0.mlp.up_proj": "was not converted"}
    assert 0.8 < report.kept < 1.0


def test_full_tuning_trains_everything_under_the_original_names() -> None:
    model = tiny_qwen2(dtype=torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = plan_for(model, recipe=CURRENT, tuner="full")
    full = inject_precision(model, plan, "cpu")
    # In the same order too: optimizer states go by it, and may be resumed without FP8.
    assert [name for name, p in full.named_parameters() if p.requires_grad] == names
    step(full, plan)
    assert all(p.grad is not None and p.grad.any() for p in full.parameters())
    tensors = plain_state_dict(full)
    assert list(tensors) == names  # the tied head appears once
    assert all(torch.equal(tensors[name], original[name]) for name in names)


def test_a_plain_state_is_read_back_and_a_wrong_one_refused() -> None:
    model = tiny_qwen2()
    full = inject_precision(model, plan_for(model, recipe=CURRENT, tuner="full"), "cpu")
    tensors = {name: tensor + 1 for name, tensor in plain_state_dict(full).items()}
    load_plain_state_dict(full, tensors)
    assert all(torch.equal(tensors[name], t) for name, t in plain_state_dict(full).items())
    assert full.lm_head.weight is full.model.embed_tokens.weight
    load_plain_state_dict(full, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(SwiftFP8Error, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        load_plain_state_dict(full, {k: v for k, v in tensors.items() if k != name})
    with pytest.raises(SwiftFP8Error, match=r"holds model\.other"):
        load_plain_state_dict(full, {**tensors, "model.other": torch.ones(1)})
    with pytest.raises(SwiftFP8Error, match=r"is \(2, 2\)"):
        load_plain_state_dict(full, {**tensors, name: torch.ones(2, 2)})


def test_a_frozen_base_holds_one_byte_a_parameter() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    plan = plan_for(model, recipe=CURRENT)
    parameters = sum(
        layer.in_features * layer.out_features
        for layer in plan.layers
        if layer.precision == "fp8_current"
    )
    adapted = inject_precision(model, plan, "cpu")
    step(adapted, plan)
    held = count_bytes(adapted)
    assert held.fp8_parameters == parameters
    assert held.fp8 == parameters + 4 * 14
    assert held.trained == 4 * sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    head_and_embedding = 2 * 2 * 256 * 128
    assert head_and_embedding < held.other < head_and_embedding + 4096
    assert held.total == held.fp8 + held.trained + held.other


def test_delayed_scaling_resumes_exactly() -> None:
    def fresh():
        model = tiny_llama()
        plan = plan_for(model, recipe=DELAYED, tuner="full")
        return inject_precision(model, plan, "cpu"), plan

    model, plan = fresh()
    for seed in range(3):
        step(model, plan, seed)
    saved = {name: tensor.clone() for name, tensor in scaling_state(model).items()}
    straight = step(model, plan, 7)
    grad = model.model.layers[0].mlp.up_proj.weight.grad.clone()
    resumed, plan = fresh()
    forgetful = step(resumed, plan, 7)
    resumed, plan = fresh()
    load_scaling_state(resumed, saved)
    assert step(resumed, plan, 7) == straight != forgetful
    assert torch.equal(resumed.model.layers[0].mlp.up_proj.weight.grad, grad)


def test_the_adapter_is_drawn_from_the_seeded_state() -> None:
    def drawn(seed: int) -> torch.Tensor:
        model = tiny_llama()
        plan = plan_for(model, recipe=CURRENT)
        torch.manual_seed(seed)
        adapted = inject_precision(model, plan, "cpu")
        return adapted.base_model.model.model.layers[1].mlp.up_proj.lora_A.default.weight

    assert torch.equal(drawn(7), drawn(7))
    assert not torch.equal(drawn(7), drawn(8))


def test_recipes_without_memory_have_no_state() -> None:
    model = tiny_llama()
    plan = plan_for(model, recipe=CURRENT)
    adapted = inject_precision(model, plan, "cpu")
    step(adapted, plan)
    assert scaling_state(adapted) == {}


def test_a_backend_that_cannot_run_is_an_error_not_a_fallback() -> None:
    if torch.cuda.is_available():
        pytest.skip("Transformer Engine may work here")
    model = tiny_llama()
    with pytest.raises(SwiftFP8Error, match="Transformer Engine can't be imported"):
        inject_precision(model, plan_for(model, recipe=CURRENT, backend="te"), "cpu")

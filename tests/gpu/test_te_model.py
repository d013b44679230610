"""A model of Qwen2.5-0.5B's shape under Transformer Engine, against its own BF16 self."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from model_kit import plan_for, rule_batch
from peft import PeftModel
from transformers import Qwen2Config, Qwen2ForCausalLM

from swiftfp8.inject import (
    count_bytes,
    forward_context,
    inject_precision,
    measure_coverage,
    plain_state_dict,
)
from swiftfp8.plan import FP8_RECIPES, RecipeOptions
from swiftfp8.precision.recipes import sqnr_db

RECIPES = ("fp8_current", "fp8_delayed", "fp8_block")


def qwen_half_billion() -> Qwen2ForCausalLM:
    """Random weights, the same each time, in BF16 on the GPU."""
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    return model.train()


def data(seed: int = 0, length: int = 128) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in rule_batch(seed=seed, length=length).items()}


def injected(recipe: RecipeOptions | None, tuner: str = "lora", *, checkpointing: bool = False):
    model = qwen_half_billion()
    plan = plan_for(
        model,
        recipe=recipe,
        backend=None if recipe is None else "te",
        tuner=tuner,
        rank=16,
        gradient_checkpointing=checkpointing,
        compute_dtype="bf16",
    )
    return inject_precision(model, plan, "cuda"), plan


def backward(model, plan, seed: int = 0) -> float:
    model.zero_grad()
    with forward_context(plan), torch.autocast("cuda", torch.bfloat16):
        loss = model(**data(seed)).loss
    loss.backward()
    return loss.item()


def gradient(model) -> torch.Tensor:
    """All gradients in one vector, the layers' and not the huge embedding's."""
    named = sorted(model.named_parameters(), key=lambda pair: pair[0])
    parts = [
        parameter.grad.flatten().float()
        for name, parameter in named
        if parameter.requires_grad and "embed" not in name
    ]
    return torch.cat(parts)


def train(model, plan, steps: int, lr: float) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)
    losses = []
    for step in range(steps):
        losses.append(backward(model, plan, seed=step))
        optimizer.step()
    return losses


@pytest.mark.parametrize("name", RECIPES)
def test_lora_coverage_memory_and_loss(name: str) -> None:
    reference, plain_plan = injected(None)
    expected = backward(reference, plain_plan)
    del reference
    gc.collect()
    torch.cuda.empty_cache()
    model, plan = injected(RecipeOptions(recipe=name))
    converted = [layer for layer in plan.layers if layer.precision in FP8_RECIPES]
    assert len(converted) == 24 * 7
    assert backward(model, plan) == pytest.approx(expected, rel=0.01)
    assert measure_coverage(model, plan).kept == 1.0
    held = count_bytes(model)
    assert held.fp8_parameters == sum(c.in_features * c.out_features for c in converted)
    assert held.fp8 <= 1.15 * held.fp8_parameters
    # What the allocator holds between steps: weights, adapter, cuBLAS workspaces.
    model.zero_grad()
    gc.collect()
    assert torch.cuda.memory_allocated() <= 1.05 * held.total + 200 * 2**20


@pytest.mark.parametrize("tuner", ["lora", "full"])
@pytest.mark.parametrize("name", RECIPES)
def test_gradient_checkpointing_changes_nothing(name: str, tuner: str) -> None:
    results = []
    peaks = []
    for checkpointing in (False, True):
        model, plan = injected(RecipeOptions(recipe=name), tuner, checkpointing=checkpointing)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        losses = [backward(model, plan, seed) for seed in range(2)]
        peaks.append(torch.cuda.max_memory_allocated() - held)
        results.append((losses, gradient(model)))
        if tuner == "lora":
            assert count_bytes(model).fp8 <= 1.15 * count_bytes(model).fp8_parameters
        del model
        gc.collect()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    # Attention's backward adds up in no fixed order, which FP8's rounding then spreads.
    assert sqnr_db(results[0][1], results[1][1]) > 30
    if tuner == "lora":
        assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.parametrize("name", RECIPES)
def test_full_tuning_gradients_follow_bf16(name: str) -> None:
    reference, plain_plan = injected(None, "full")
    expected = backward(reference, plain_plan)
    exact = gradient(reference)
    names = set(plain_state_dict(reference))
    del reference
    gc.collect()
    model, plan = injected(RecipeOptions(recipe=name), "full")
    assert backward(model, plan) == pytest.approx(expected, rel=0.01)
    assert measure_coverage(model, plan).kept == 1.0
    # Seen emulated: 16.6-17 dB over 24 layers.
    assert sqnr_db(exact, gradient(model)) > 12
    assert set(plain_state_dict(model)) == names


def test_learns_as_bf16_does_and_plain_peft_reads_the_adapter(tmp_path: Path) -> None:
    reference, plain_plan = injected(None)
    expected = train(reference, plain_plan, 30, 3e-3)
    del reference
    gc.collect()
    model, plan = injected(RecipeOptions(recipe="fp8_block"))
    losses = train(model, plan, 30, 3e-3)
    assert losses[-1] < losses[0] - 2
    assert sum(losses[-5:]) == pytest.approx(sum(expected[-5:]), rel=0.02)
    model.save_pretrained(tmp_path)
    tokens = {"input_ids": data(99)["input_ids"]}
    with torch.no_grad():
        with forward_context(plan):
            ours = model.eval()(**tokens).logits
        plain = PeftModel.from_pretrained(qwen_half_billion(), tmp_path).eval()
        unmerged = plain(**tokens).logits
        merged = plain.merge_and_unload()(**tokens).logits
    assert sqnr_db(unmerged, merged) > 30  # BF16 rounding of the merged weights, over 24 layers
    assert sqnr_db(unmerged, ours) > 12  # FP8's own noise


def test_generation_takes_any_prompt_length() -> None:
    model, plan = injected(RecipeOptions(recipe="fp8_block"))
    model.eval()
    with torch.no_grad(), forward_context(plan):
        out = model.generate(
            input_ids=data(length=13)["input_ids"][:1], max_new_tokens=5, do_sample=False
        )
    assert out.shape == (1, 18)

"""Packed rows train as they would alone: losses and gradients agree, and no row sees another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from model_kit import plan_for, tiny_llama, tiny_qwen2
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM
from transformers.integrations import flex_attention as flex

from swiftfp8.data.collator import Collator
from swiftfp8.data.lengths import MASKED
from swiftfp8.data.packing import PackCollator, pack_rows
from swiftfp8.data.token_rows import TokenRows
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.inject import inject_precision
from swiftfp8.plan import RecipeOptions
from swiftfp8.train.separation import leak, require_separate_rows

LENGTHS = (5, 23, 9, 14, 30, 2, 17, 11)
CAPACITY = 48


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def small(kind: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation=attention,
        use_cache=False,
    )
    if kind == "mistral":  # a sliding window on every layer
        model = MistralForCausalLM(MistralConfig(**shape, sliding_window=6))
    elif kind == "gemma3":  # a sliding and a full layer, two rotary tables
        layers = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**shape, head_dim=16, sliding_window=6, layer_types=layers)
        model = Gemma3ForCausalLM(config)
    else:
        model = tiny_llama(hidden=64) if kind == "llama" else tiny_qwen2()
        model.config.use_cache = False
        model.set_attn_implementation(attention)
    return model.train()


def make_rows() -> TokenRows:
    rng = np.random.default_rng(0)
    pairs = []
    for length in LENGTHS:
        ids = rng.integers(3, 250, length).astype(np.int32)
        labels = ids.copy()
        labels[: length // 3] = MASKED  # the shortest row has a label on its first token
        pairs.append((ids, labels))
    return TokenRows.of(pairs)


def loss_and_gradients(model, batches):
    """Summed over batches and divided by all predicted tokens, as the trainer does it."""
    count = sum(int((batch["labels"][:, 1:] != MASKED).sum()) for batch in batches)
    model.zero_grad()
    total = 0.0
    for batch in batches:
        batch = {key: value for key, value in batch.items() if key != "num_tokens"}
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    return total, count, {name: p.grad.clone() for name, p in model.named_parameters()}


def packed_batches(packs_each: int, multiple: int, flatten: bool = False):
    packed = pack_rows(make_rows(), CAPACITY, seed=1)
    assert len(packed) >= 3
    collate = PackCollator(token_multiple=multiple, flatten=flatten)
    packs = [packed[k] for k in range(len(packed))]
    return [collate(packs[k : k + packs_each]) for k in range(0, len(packs), packs_each)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma3"])
@pytest.mark.parametrize(
    ("packs_each", "multiple", "flatten"),
    [(1, 1, False), (2, 1, False), (3, 16, False), (2, 128, False), (3, 16, True)],
)
def test_packed_and_unpacked_agree(kind, attention, packs_each, multiple, flatten):
    model = small(kind, attention)
    rows = make_rows()
    alone = [Collator(pad_id=0)([rows[k]]) for k in range(len(rows))]
    loss, count, gradients = loss_and_gradients(model, alone)
    together = loss_and_gradients(model, packed_batches(packs_each, multiple, flatten))
    assert together[1] == count
    assert together[0] == pytest.approx(loss, abs=1e-6)
    for name, gradient in gradients.items():
        assert (together[2][name] - gradient).abs().max() < 1e-6, name


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("wrong", ["mask of ones", "positions that go on", "cache"])
def test_what_must_not_be_passed_makes_rows_see_each_other(attention, wrong):
    """The three ways to lose the block-diagonal mask; each is off by far more than 1e-6."""
    model = small("llama", attention)
    right = loss_and_gradients(model, packed_batches(2, 1))[0]
    batches = packed_batches(2, 1)
    for batch in batches:
        if wrong == "mask of ones":
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        elif wrong == "positions that go on":
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        else:
            batch["use_cache"] = True
    assert abs(loss_and_gradients(model, batches)[0] - right) > 1e-4


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_no_gradient_flows_between_rows(attention, flatten):
    model = small("llama", attention)
    (batch,) = packed_batches(3, 16, flatten)
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, position_ids=batch["position_ids"]).logits
    starts = (batch["position_ids"] == 0).nonzero().tolist()
    row, first = starts[1]
    end = next((at for k, at in starts[2:] if k == row), logits.shape[1])
    logits[row, first:end].square().sum().backward()
    touched = embedded.grad.abs().sum(-1) > 0
    assert touched[row, first:end].all()
    assert touched.sum() == end - first


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("flatten", [False, True])
def test_flex_attention_sees_what_sdpa_sees(monkeypatch, kind, flatten):
    """It has no backward pass on a CPU, and its forward pass runs here without being compiled."""
    monkeypatch.setattr(flex.WrappedFlexAttention, "__call__", lambda self: flex.flex_attention)
    batch = packed_batches(3, 16, flatten)[0]
    inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
    with torch.no_grad():
        wanted = small(kind, "sdpa").eval()(**inputs).logits
        found = small(kind, "flex_attention").eval()(**inputs).logits
    assert (found - wanted).abs().max() < 1e-5


def test_the_check_before_training_passes_and_leaves_the_model_as_it_was():
    recipe = RecipeOptions(recipe="fp8_delayed")
    model = tiny_llama(hidden=64)
    model.config.use_cache = False
    plan = plan_for(model, recipe=recipe, backend="emulated", tuner="lora")
    model = inject_precision(model, plan, "cpu").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for flatten in (False, True):
        assert leak(model, plan, PackCollator(token_multiple=16, flatten=flatten)) == 0.0
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("compute_dtype", ["fp32", "bf16"])
def test_the_check_before_training_finds_a_model_that_leaks(compute_dtype):
    model = tiny_llama(hidden=64)
    model.config.use_cache = False
    plan = replace(plan_for(model, recipe=None, backend=None), compute_dtype=compute_dtype)
    plain = model.model.forward

    def ignores_positions(*args, position_ids=None, **kwargs):
        return plain(*args, **kwargs)

    model.model.forward = ignores_positions
    with pytest.raises(SwiftFP8Error, match="packed rows see each other in LlamaForCausalLM"):
        require_separate_rows(model, plan, PackCollator())
    model.model.forward = plain
    require_separate_rows(model, plan, PackCollator())


def test_filling_up_does_not_widen_any_range():
    """The largest input of each linear is that of the real tokens, whatever fills the pack."""
    model = small("llama", "sdpa")
    seen: dict[int, list[float]] = {}
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_hook(
                lambda m, args, out: seen.setdefault(id(m), []).append(args[0].abs().max().item())
            )
    packed = pack_rows(make_rows(), CAPACITY, seed=1)
    for multiple in (1, 128):
        batch = PackCollator(token_multiple=multiple)([packed[0]])
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    # other shapes sum in another order: equal to rounding
    assert seen and all(filled == pytest.approx(tight, rel=1e-5) for tight, filled in seen.values())

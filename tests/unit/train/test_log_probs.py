"""Log-probabilities in chunks, the reference that is the model itself, and what it costs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_kit import plan_for, tiny_llama
from torch.nn import functional

from swiftfp8.config.schema import RlhfConfig
from swiftfp8.inject import forward_context, inject_precision
from swiftfp8.plan import RecipeOptions
from swiftfp8.train import log_probs
from swiftfp8.train.log_probs import linear_log_probs, offer_log_probs
from swiftfp8.train.losses import fuse_loss
from swiftfp8.train.objectives.prefer import Preferring, answer_log_probs, as_reference

CURRENT = RecipeOptions(recipe="fp8_current")


def make_batch(rows: int = 2, width: int = 32, seed: int = 1) -> dict[str, torch.Tensor]:
    """Padded answers of different lengths, after prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 256, (2 * rows, width), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for k in range(2 * rows):
        start, end = 4 + k, width - 3 * k
        labels[k, :start] = labels[k, end:] = -100
        mask[k, end:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def by_hand(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each answer's log-probability from plain logits.

    Without the mask, as the objective runs: an FP8 scale for all tokens sees the padding's, too.
    """
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits.float().log_softmax(-1)[:, :-1]
    labels = batch["labels"][:, 1:]
    picked = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (picked * (labels != -100)).sum(1)


def adapted(fp8: bool, *, lora: bool = True):
    """The same tiny model each time, with an adapter that changes it; without, its base."""
    model = tiny_llama(hidden=64)
    plan = plan_for(model, recipe=CURRENT if fp8 else None, backend="emulated" if fp8 else None)
    if not lora:
        plan = dataclasses.replace(plan, lora=None)
    torch.manual_seed(3)
    injected = inject_precision(model, plan, "cpu")
    for name, parameter in injected.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return injected, plan


def test_chunks_give_log_softmax_and_its_gradients(monkeypatch):
    monkeypatch.setattr(log_probs, "CHUNK_ELEMENTS", {"cpu": 40})  # 128 rows at once
    torch.manual_seed(0)
    hidden = torch.randn(2, 150, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 40, (2, 150))
    labels[0, :7] = -100
    weights = torch.randn(2, 150, dtype=torch.float64)
    found = linear_log_probs(hidden, weight, labels)
    (found * weights).sum().backward()
    gradients = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = functional.log_softmax(hidden @ weight.t(), -1)
    expected = logits.gather(2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    (expected * weights).sum().backward()
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert torch.allclose(gradients[0], hidden.grad, atol=1e-5)
    assert torch.allclose(gradients[1], weight.grad, atol=1e-4)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_model_answers_with_log_probabilities(chunked):
    model, batch = tiny_llama(hidden=64), make_batch()
    expected = by_hand(model, batch)
    offer_log_probs(model, chunked=chunked)
    assert torch.allclose(answer_log_probs(model, batch), expected, atol=1e-4)
    assert model(input_ids=batch["input_ids"]).logits.shape == (4, 32, 256)


@pytest.mark.parametrize("fp8", [False, True])
def test_log_ratios_equal_those_of_two_separate_models(fp8):
    policy, plan = adapted(fp8)
    reference, _ = adapted(fp8, lora=False)
    batch, beta = make_batch(), 0.3
    with forward_context(plan):
        ratios = by_hand(policy, batch) - by_hand(reference, batch)
    assert ratios.abs().max() > 1  # the adapter matters
    offer_log_probs(policy, chunked=True)
    objective = Preferring(policy, RlhfConfig(beta=beta))
    policy.train()
    with forward_context(plan):
        sums = objective.run(policy, batch).sums
    assert policy.training
    chosen, rejected = ratios.chunk(2)
    assert float(sums["rewards/chosen"]) == pytest.approx(beta * float(chosen.sum()), abs=1e-4)
    assert float(sums["rewards/rejected"]) == pytest.approx(beta * float(rejected.sum()), abs=1e-4)
    assert float(sums["rewards/accuracies"]) == float((chosen > rejected).sum())


def test_precomputed_log_probabilities_take_the_reference_s_place():
    policy, _ = adapted(fp8=False)
    offer_log_probs(policy, chunked=True)
    batch, objective = make_batch(), Preferring(policy, RlhfConfig())
    with as_reference(policy):
        known = answer_log_probs(policy, batch)
    first, second = (
        objective.run(policy, batch),
        objective.run(policy, {**batch, "ref_logps": known}),
    )
    assert torch.equal(first.loss, second.loss)


def test_the_reference_is_recorded_by_nothing():
    delayed = RecipeOptions(recipe="fp8_delayed")
    model = tiny_llama(hidden=64)
    policy = inject_precision(model, plan_for(model, recipe=delayed), "cpu")
    from swiftfp8.inject import scaling_state

    offer_log_probs(policy, chunked=True)
    batch = make_batch()
    answer_log_probs(policy, batch).sum().backward()
    before = {name: value.clone() for name, value in scaling_state(policy).items()}
    with as_reference(policy):
        answer_log_probs(policy, batch)
    after = scaling_state(policy)
    assert before and before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def saved_bytes(run) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    assert loss.requires_grad
    return sum(seen.values())


def test_a_preference_step_keeps_what_sft_keeps_of_the_same_tokens():
    batch = make_batch(width=64)
    sft, _ = adapted(fp8=True)
    assert fuse_loss(sft) is None
    usual = saved_bytes(lambda: sft(**batch).loss)
    policy, _ = adapted(fp8=True)
    offer_log_probs(policy, chunked=True)
    objective = Preferring(policy, RlhfConfig())
    assert saved_bytes(lambda: objective.run(policy, batch).loss) <= 1.15 * usual

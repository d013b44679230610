"""A weighted loss: exact values, and the same fused with the head and from whole logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from swiftfp8.precision.kernels.quantize import quantize_weight
from swiftfp8.train import losses


def by_hand(logits, labels, weights):
    """Token by token, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label, weight in zip(logits.double(), labels, weights.double(), strict=True):
        if label != -100:
            total = total - weight * functional.log_softmax(row, dim=0)[label]
    return total / weights.double()[labels != -100].sum()


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 500 * 128)  # three chunks
    torch.manual_seed(0)
    hidden = torch.randn(300, 32, requires_grad=True)
    weight = torch.randn(500, 32, requires_grad=True)
    labels = torch.randint(0, 500, (300,))
    labels[:50] = -100
    weights = torch.rand(300) * 3
    weights[60:70] = 0
    return hidden, weight, labels, weights


def test_loss_and_gradients(made) -> None:
    hidden, weight, labels, weights = made
    exact = by_hand(hidden @ weight.t(), labels, weights)
    expected = torch.autograd.grad(exact, (hidden, weight))
    loss = losses.linear_cross_entropy(hidden, weight, labels, weights=weights)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    for mine, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_only_the_proportions_of_weights_count(made) -> None:
    hidden, weight, labels, weights = made
    one = losses.linear_cross_entropy(hidden, weight, labels, weights=weights)
    ten = losses.linear_cross_entropy(hidden, weight, labels, weights=weights * 10)
    same = losses.linear_cross_entropy(hidden, weight, labels, weights=torch.full((300,), 0.25))
    assert one.item() == pytest.approx(ten.item(), rel=1e-6)
    plain = losses.linear_cross_entropy(hidden, weight, labels)
    assert same.item() == pytest.approx(plain.item(), rel=1e-6)


def test_an_fp8_heads_gradient_has_the_weights_too(made) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 128, requires_grad=True)
    data, scale = quantize_weight(torch.randn(512, 128) * 0.05)
    head = losses.Fp8Head(weight8_VK=data, scale_V=scale)
    labels, weights = torch.randint(0, 512, (64,)), torch.rand(64) * 3
    (plain,) = torch.autograd.grad(
        losses.linear_cross_entropy(hidden, head, labels, items=1), hidden
    )
    (got,) = torch.autograd.grad(
        losses.linear_cross_entropy(hidden, head, labels, items=1, weights=weights), hidden
    )
    torch.testing.assert_close(got, plain * weights[:, None], rtol=1e-5, atol=1e-7)


def test_nothing_but_zeros_gives_zero() -> None:
    hidden = torch.randn(6, 8, requires_grad=True)
    labels = torch.randint(0, 20, (6,))
    loss = losses.linear_cross_entropy(hidden, torch.randn(20, 8), labels, weights=torch.zeros(6))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any()
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=64,
        )
    )  # fmt: skip
    losses.weigh_loss(model)
    ids = torch.randint(1, 64, (2, 12))
    assert model(input_ids=ids, labels=ids, loss_weights=torch.zeros(2, 12)).loss.item() == 0


@pytest.mark.parametrize("items", [None, torch.tensor(12.5)])
def test_fused_and_whole_logits_agree(items) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config)
    fused = copy.deepcopy(plain)
    losses.weigh_loss(plain)
    assert losses.fuse_loss(fused) is None
    ids = torch.randint(1, 64, (2, 12))
    labels, weights = ids.clone(), torch.rand(2, 12) * 3
    labels[0, :5] = -100
    batch = {"input_ids": ids, "labels": labels, "loss_weights": weights}
    if items is not None:
        batch["num_items_in_batch"] = items
    whole, chunked = plain(**batch).loss, fused(**batch).loss
    logits = plain(input_ids=ids).logits[:, :-1].flatten(0, 1)
    exact = by_hand(logits, labels[:, 1:].flatten(), weights[:, 1:].flatten())
    if items is not None:
        exact = exact * weights[:, 1:][labels[:, 1:] != -100].sum() / items
    assert whole.item() == pytest.approx(exact.item(), rel=1e-6)
    assert chunked.item() == pytest.approx(exact.item(), rel=1e-5)
    whole.backward()
    chunked.backward()
    for mine, theirs in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    unweighted = {"input_ids": ids, "labels": labels}
    assert fused(**unweighted).loss.item() == pytest.approx(plain(**unweighted).loss.item(), 1e-5)

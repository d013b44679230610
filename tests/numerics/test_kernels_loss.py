"""The chunked head and loss against PyTorch's cross entropy, and inside a model."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from swiftfp8.loss_plan import PLAIN_HEADS
from swiftfp8.precision.kernels.quantize import quantize_weight
from swiftfp8.train import losses


def test_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 500 * 128)  # three chunks
    torch.manual_seed(0)
    hidden = torch.randn(300, 32, requires_grad=True)
    weight = torch.randn(500, 32, requires_grad=True)
    labels = torch.randint(0, 500, (300,))
    labels[:50] = -100
    expected = torch.autograd.grad(
        functional.cross_entropy(hidden @ weight.t(), labels), (hidden, weight)
    )
    loss = losses.linear_cross_entropy(hidden, weight, labels)
    got = torch.autograd.grad(loss, (hidden, weight))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_callers_count_replaces_the_mean() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8), torch.randn(20, 8)
    labels = torch.randint(0, 20, (10,))
    mean = losses.linear_cross_entropy(hidden, weight, labels)
    by_40 = losses.linear_cross_entropy(hidden, weight, labels, items=torch.tensor(40))
    assert by_40.item() == pytest.approx(mean.item() / 4, rel=1e-5)


def test_only_masked_labels_give_zero_and_no_gradient() -> None:
    hidden = torch.randn(6, 8, requires_grad=True)
    loss = losses.linear_cross_entropy(hidden, torch.randn(20, 8), torch.full((6,), -100))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any()


def test_fp8_head_is_close() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 128, requires_grad=True)
    weight = torch.randn(512, 128) * 0.05
    labels = torch.randint(0, 512, (64,))
    exact = losses.linear_cross_entropy(hidden, weight, labels)
    (expected,) = torch.autograd.grad(exact, hidden)
    data, scale = quantize_weight(weight)
    head = losses.Fp8Head(weight8_VK=data, scale_V=scale)
    loss = losses.linear_cross_entropy(hidden, head, labels)
    (got,) = torch.autograd.grad(loss, hidden)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    # Probabilities below 2**-16 of a row's largest gradient are flushed: 20 dB, as for dx.
    assert (got - expected).norm() / expected.norm() < 0.1


def test_model_returns_the_plain_models_loss() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (2, 16))
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    assert losses.fuse_loss(model) is None
    fused = model(input_ids=ids, labels=ids)
    fused.loss.backward()
    assert fused.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert fused.logits is None
    torch.testing.assert_close(model.model.embed_tokens.weight.grad, gradient, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(model(input_ids=ids).logits, expected.logits)
    twice = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(60)).loss
    assert twice.item() == pytest.approx(expected.loss.item() * 30 / 60, rel=1e-5)


@pytest.mark.parametrize("architecture", sorted(PLAIN_HEADS))
def test_every_architecture_that_auto_fuses_has_a_plain_head(architecture: str) -> None:
    kind = getattr(transformers, architecture)
    config = kind.config_class(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, vocab_size=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    small = {
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    }  # fmt: skip
    for name, value in small.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    ids = torch.randint(3, 64, (2, 12))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss.item()
        assert losses.fuse_loss(model) is None
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-5)


def test_autocast_sets_the_dtype_of_the_chunks() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32, requires_grad=True), torch.randn(100, 32)
    labels = torch.randint(0, 100, (64,))
    low = losses.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss = losses.linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss.item() == low.item()
    assert hidden.grad.dtype == torch.float32

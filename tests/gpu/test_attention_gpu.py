"""Flex attention has a backward pass on a GPU only: packed rows, against SDPA's mask."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.gpu

LENGTHS = ((5, 90, 33), (64, 1, 63))


def model(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        use_cache=False,
    )
    return LlamaForCausalLM(config).cuda().train()


def gradients(attention: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of two packed sequences of 128 tokens."""
    made = model(attention)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 256, (2, 128), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    labels = ids.masked_fill(positions == 0, -100)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    loss = made(**{key: value.cuda() for key, value in batch.items()}).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in made.named_parameters()}


def test_packed_rows_train_under_flex_attention_as_under_sdpa() -> None:
    wanted, reference = gradients("sdpa")
    found, grads = gradients("flex_attention")
    assert found == pytest.approx(wanted, rel=1e-4)
    for name, gradient in reference.items():
        # Two kernels in FP32 (TF32 at most) that sum in other orders.
        assert (grads[name] - gradient).norm() <= 1e-2 * gradient.norm() + 1e-6, name

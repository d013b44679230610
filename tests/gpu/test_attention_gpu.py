"""Flex attention has a backward pass on a GPU only: packed rows, against SDPA's mask."""

from __future__ import annotations

import pytest
import torch
from model_kit import tiny_llama

pytestmark = pytest.mark.gpu

LENGTHS = ((5, 90, 33), (64, 1, 63))


def gradients(attention: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of two packed sequences of 128 tokens."""
    made = tiny_llama(attention=attention).cuda().train()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 256, (2, 128), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    labels = ids.masked_fill(positions == 0, -100)
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    loss = made(**{key: value.cuda() for key, value in batch.items()}, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in made.named_parameters()}


def test_packed_rows_train_under_flex_attention_as_under_sdpa() -> None:
    wanted, reference = gradients("sdpa")
    found, grads = gradients("flex_attention")
    assert found == pytest.approx(wanted, rel=1e-4)
    for name, gradient in reference.items():
        # Two kernels in FP32 (TF32 at most) that sum in other orders.
        assert (grads[name] - gradient).norm() <= 1e-2 * gradient.norm() + 1e-6, name

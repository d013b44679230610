"""Selective activation checkpointing: keep what matmuls and attention put out, make the rest again.

PyTorch keeps the outputs of the chosen operators in the forward pass and hands them out again when
a layer is recomputed, so that only cheap operators really run a second time: norms, rotary
positions, SwiGLU, casts. A LoRA product x Aᵀ Bᵀ is cheap as well, for its summed dimension is the
rank, while its output is as large as the base matmul's: it is made again.

An operator that changes a kept tensor in place would change what the recomputation sees, which is
why the torch backend's unfused linears, whose kernels do, are checkpointed in full.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_MATMULS = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    }
)
_ATTENTION = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_attention_math.default,
    }
)


def selective_checkpoint(lora_rank: int) -> Callable[..., Any]:
    """A checkpoint function that keeps matmuls that sum over more than `lora_rank` elements."""
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, lora_rank))
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _policy(lora_rank: int, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if operator in _MATMULS and args[-1].shape[-2] > lora_rank:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE

"""Inputs of FP8 linears rounded to e4m3 as an engine does, in a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swiftfp8.export.layout import Layout
from swiftfp8.export.quantize import FP8_MAX


@contextmanager
def inputs_rounded(model: Any, layout: Layout, group: int | None) -> Iterator[int]:
    """Round in groups of `group` elements, 0 being a whole token; yields how many linears do.

    A scale is the largest magnitude of a group, or the one that the layout fixes for all inputs of
    a linear, over e4m3's largest value. Experts that the model runs as one module are not found;
    without a group nothing is rounded.
    """
    if group is None:
        yield 0
        return
    names = {name.removesuffix(".weight") for name in layout.quantized}
    found = {name: module for name, module in model.named_modules() if name in names}
    hooks = []
    for name, module in found.items():
        fixed = layout.input_amax.get(name) if layout.input_amax else None
        hooks.append(
            module.register_forward_pre_hook(
                lambda _, inputs, fixed=fixed: (_rounded(inputs[0], group, fixed),)
            )
        )
    try:
        yield len(found)
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(x: Tensor, group: int, fixed_amax: float | None = None) -> Tensor:
    parts = x.float().reshape(*x.shape[:-1], -1, group or x.shape[-1])
    amax = parts.abs().amax(-1, keepdim=True)
    if fixed_amax is not None:
        amax = torch.full_like(amax, fixed_amax)
    scale = amax.clamp(min=1e-12) / FP8_MAX
    values = (parts / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (values.float() * scale).reshape(x.shape).to(x.dtype)

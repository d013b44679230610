"""How large the inputs of linears get on real text, for formats with static activation scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.layers import fused_siblings
from swiftfp8.export.layout import Layout
from swiftfp8.export.source import Source, build_model

_FLOOR = 1e-6  # an input that was always zero still needs a scale


def measure_input_amax(
    source: Source,
    layout: Layout,
    windows_BT: Tensor,
    *,
    device: str = "cpu",
) -> dict[str, float]:
    """Largest magnitude of every FP8 linear's input over token ids; fused siblings share one.

    Raises:
        SwiftFP8Error: linears that no module of the model is.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    merged = ((name, source.merged(name)) for name in source.tensors)
    model = build_model(source, merged, dtype=dtype, device=device)
    wanted = {name.removesuffix(".weight") for name in layout.quantized}
    amax = {name: _FLOOR for name in wanted}
    modules = dict(model.named_modules())
    missing = sorted(wanted - modules.keys())
    if missing:
        raise SwiftFP8Error(
            f"the inputs of {missing[0]} can't be measured: experts run as one module",
            where=str(source.directory),
            fix=f"export.exclude=['*experts*'], or another format than {layout.format}",
        )
    hooks = [modules[name].register_forward_pre_hook(_watch(amax, name)) for name in wanted]
    with torch.inference_mode():
        for window_T in windows_BT:
            model(input_ids=window_T[None].to(model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    groups = {name: [m for m in fused_siblings(name) if m in amax] or [name] for name in amax}
    return {name: max(amax[member] for member in groups[name]) for name in sorted(amax)}


def _watch(amax: dict[str, float], name: str) -> Any:
    def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
        amax[name] = max(amax[name], float(inputs[0].abs().amax()))

    return hook

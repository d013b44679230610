"""How large inputs of linears, keys and values get on real text, for formats with static scales."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.layers import fused_siblings
from swiftfp8.export.layout import Layout
from swiftfp8.export.source import Source, build_model

_FLOOR = 1e-6  # an input that was always zero still needs a scale


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Largest magnitudes: of linears' inputs by linear, of (keys, values) by attention module."""

    inputs: Mapping[str, float] | None
    keys_values: Mapping[str, tuple[float, float]] | None


def measure_ranges(
    source: Source,
    layout: Layout,
    windows_BT: Tensor,
    *,
    inputs: bool,
    keys_values: bool,
    device: str = "cpu",
) -> Ranges:
    """Run the merged model over token ids and note what is asked for.

    Inputs are those of every FP8 linear; fused siblings share one. Keys (after the rotary
    embedding) and values are taken as the model hands them to its cache.

    Raises:
        SwiftFP8Error: linears that no module of the model is; keys or values that can't be seen.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    merged = ((name, source.merged(name)) for name in source.tensors)
    model = build_model(source, merged, dtype=dtype, device=device)
    watch = _InputWatch(source, layout, model) if inputs else None
    cached: dict[int, tuple[float, float]] = {}
    newer = "cache" in inspect.signature(model.forward).parameters
    cache_name = "cache" if newer else "past_key_values"
    with torch.inference_mode():
        for window_T in windows_BT:
            ids = window_T[None].to(model.device)
            if keys_values:
                model(input_ids=ids, use_cache=True, **{cache_name: _watching_cache(cached)})
            else:
                model(input_ids=ids, use_cache=False)
    return Ranges(
        inputs=watch.largest() if watch else None,
        keys_values=_by_module(source, layout, model, cached) if keys_values else None,
    )


class _InputWatch:
    """Notes the largest magnitude of what reaches each FP8 linear."""

    def __init__(self, source: Source, layout: Layout, model: Any) -> None:
        wanted = {name.removesuffix(".weight") for name in layout.quantized}
        self._amax = {name: _FLOOR for name in wanted}
        modules = dict(model.named_modules())
        missing = sorted(wanted - modules.keys())
        if missing:
            raise SwiftFP8Error(
                f"the inputs of {missing[0]} can't be measured: experts run as one module",
                where=str(source.directory),
                fix=f"export.exclude=['*experts*'], or another format than {layout.format}",
            )
        for name in wanted:
            modules[name].register_forward_pre_hook(self._hook(name))

    def largest(self) -> dict[str, float]:
        """By linear; fused siblings have the largest of theirs."""
        amax = self._amax
        groups = {name: [m for m in fused_siblings(name) if m in amax] or [name] for name in amax}
        return {name: max(amax[member] for member in groups[name]) for name in sorted(amax)}

    def _hook(self, name: str) -> Any:
        def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
            self._amax[name] = max(self._amax[name], float(inputs[0].abs().amax()))

        return hook


def _watching_cache(seen: dict[int, tuple[float, float]]) -> Any:
    """A cache that notes the largest keys and values of each layer."""
    from transformers import DynamicCache

    class Watching(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any
        ) -> Any:
            key, value = seen.get(layer_idx, (_FLOOR, _FLOOR))
            seen[layer_idx] = (
                max(key, float(key_states.abs().amax())),
                max(value, float(value_states.abs().amax())),
            )
            return super().update(key_states, value_states, layer_idx, *rest, **more)

    return Watching()


def _by_module(
    source: Source, layout: Layout, model: Any, cached: Mapping[int, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Ranges by the checkpoint's names of attention modules."""
    stored = {name: alias for alias, name in source.layers.aliases.items()}
    found: dict[str, tuple[float, float]] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if (
            isinstance(index, int)
            and index in cached
            and type(module).__name__.endswith("Attention")
        ):
            projection = f"{name}.k_proj"
            found[stored.get(projection, projection).removesuffix(".k_proj")] = cached[index]
    if len(found) != len(cached) or not found:
        raise SwiftFP8Error(
            "this model's keys and values can't be measured: its attention is no plain one",
            where="export.kv_cache",
            fix="export without export.kv_cache",
        )
    for name, (key, value) in found.items():
        if not (math.isfinite(key) and math.isfinite(value)):
            raise SwiftFP8Error("keys or values are NaN or infinite on these rows", where=name)
    return found

"""compressed-tensors: one scale per output channel; activations per token, or by measured scales.

A quantized linear has `<name>.weight` [N, K] in e4m3 and `<name>.weight_scale` [N, 1] in float32,
and `<name>.input_scale` [1] where the scales of activations are static.
Dimensions need only be multiples of 16, so models that do not fit 128 x 128 blocks can be FP8 in
whole. vLLM, SGLang and TensorRT-LLM read it, transformers with the package `compressed-tensors`.
In a checkpoint of somebody else's, `ignore` and `targets` may hold regexes ("re:...").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from swiftfp8.export.layers import Decision, ModelLayers
from swiftfp8.export.layout import Fault, FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.quantize import BLOCK
from swiftfp8.export.scheme import (
    Scheme,
    describe_weights,
    kept_names,
    reference_weights,
    write_weights,
)
from swiftfp8.export.section import odd_types
from swiftfp8.export.source import Source
from swiftfp8.export.structure import Declared, check_quantized, module_names

NAME = "compressed_tensors"
KV_CACHE = True
STATIC_INPUTS = "optional"
SCHEME = Scheme(
    format=NAME,
    granularity="channel",
    scale_suffix="_scale",
    multiple=(16, 16),
    input_scale_shape=(1,),
)
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_STATIC = {**_FLOAT8, "strategy": "tensor", "dynamic": False}
_DYNAMIC = {**_FLOAT8, "strategy": "token", "dynamic": True}
_WHERE = "config.json: quantization_config"
_GRANULARITIES: Mapping[str, Literal["block", "channel", "tensor"]] = {
    "block": "block",
    "channel": "channel",
    "tensor": "tensor",
}


def describe(source: Source, options: FormatOptions) -> Layout:
    """Quantize every linear whose dimensions are multiples of 16, with its fused siblings."""
    section = partial(
        _section, static=options.input_amax is not None, kv_cache=options.kv_amax is not None
    )
    return describe_weights(SCHEME, source, options, section)


def write(source: Source, layout: Layout, directory: Path, job: WriteJob) -> tuple[LayerError, ...]:
    """Merge, quantize and write, a slab of rows at a time."""
    return write_weights(SCHEME, source, layout, directory, job)


def reference(source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors, those of quantized linears through FP8 and back (exact in BF16)."""
    return reference_weights(SCHEME, source, layout)


def verify(directory: Path, layers: ModelLayers) -> list[Fault]:
    """All that headers, bytes and config.json must satisfy."""
    section = layers.config.get("quantization_config")
    if not isinstance(section, Mapping):
        return [Fault(where="config.json", what="has no quantization_config")]
    kinds = {
        "config_groups": "an object",
        "kv_cache_scheme": "an object",
        "ignore": "a list of names",
    }
    if odd := odd_types(section, kinds, _WHERE):
        return odd
    groups = list((section.get("config_groups") or {}).values())
    if len(groups) != 1:
        what = f"has {len(groups)} config_groups; swiftfp8 checks one that is FP8"
        return [Fault(where=_WHERE, what=what)]
    if odd := _odd_group(groups[0]):
        return odd
    return check_quantized(directory, layers, _declared(directory, layers, section, groups[0]))


def _odd_group(group: Any) -> list[Fault]:
    where = f"{_WHERE}.config_groups"
    if not isinstance(group, Mapping):
        return [Fault(where=where, what=f"has {group!r} in place of an object")]
    kinds = {
        "weights": "an object",
        "input_activations": "an object",
        "targets": "a list of names",
    }
    odd = odd_types(group, kinds, where)
    blocks = {"block_structure": "a list of lengths"}
    return odd or odd_types(group.get("weights") or {}, blocks, f"{where}: weights")


def _declared(
    directory: Path, layers: ModelLayers, section: Mapping[str, Any], group: Mapping[str, Any]
) -> Declared:
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    faults = []
    expected = {**_FLOAT8, "dynamic": False}
    for key, value in expected.items():
        if weights.get(key, value) != value:
            faults.append(Fault(where=_WHERE, what=f"weights.{key} is {weights[key]!r}"))
    if inputs is None:
        what = "quantizes weights only: engines run it, with BF16 matmuls"
        faults.append(Fault(where=_WHERE, what=what, severity="warning"))
    if section.get("format") not in ("float-quantized", "naive-quantized"):
        faults.append(Fault(where=_WHERE, what=f"format is {section.get('format')!r}"))
    strategy = str(weights.get("strategy"))
    granularity = _GRANULARITIES.get(strategy)
    if granularity is None or (
        granularity == "block" and list(weights.get("block_structure") or ()) != list(BLOCK)
    ):
        faults.append(Fault(where=_WHERE, what=f"the weights' strategy {strategy} is not known"))
    cache = section.get("kv_cache_scheme") or {}
    for key, value in (_STATIC if cache else {}).items():
        if cache.get(key, value) != value:
            faults.append(Fault(where=_WHERE, what=f"kv_cache_scheme.{key} is {cache[key]!r}"))
    known = module_names(directory, layers)
    kept, unknown = _resolve(section.get("ignore") or (), known)
    targeted, _ = _resolve(group.get("targets") or (), known)
    all_linears = "Linear" in (group.get("targets") or ())
    return Declared(
        scheme=Scheme(
            format=NAME,
            granularity=granularity or "channel",
            scale_suffix="_scale",
            multiple=BLOCK if granularity == "block" else SCHEME.multiple,
        ),
        kept=frozenset(kept if all_linears else kept | (known - targeted)),
        unknown=unknown,
        where="config.json: quantization_config.ignore",
        static_inputs=inputs is not None and inputs.get("dynamic") is False,
        kv_scales=bool(cache),
        faults=faults,
    )


def _resolve(entries: Sequence[str], known: set[str]) -> tuple[set[str], list[str]]:
    """Modules that the entries name, by full name or by regex; and names of no module."""
    found: set[str] = set()
    unknown = []
    for entry in entries:
        if entry.startswith("re:"):
            found |= {name for name in known if re.match(entry[3:], name)}
        elif entry in known:
            found.add(entry)
        else:
            unknown.append(entry)
    return found, unknown


def _section(
    source: Source, decisions: tuple[Decision, ...], *, static: bool, kv_cache: bool
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {**_FLOAT8, "strategy": "channel", "dynamic": False},
        "input_activations": _STATIC if static else _DYNAMIC,
        "output_activations": None,
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "kv_cache_scheme": _STATIC if kv_cache else None,
            "ignore": kept_names(source, decisions),
        }
    }

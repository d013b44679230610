"""`quant_method: fp8` with one scale per weight: the oldest FP8 layout, for vLLM and SGLang.

A quantized linear has `<name>.weight` [N, K] in e4m3 and `<name>.weight_scale` [] in float32, the
same for q, k and v and for gate and up; activations are quantized by the engine as it runs, or by
`<name>.input_scale` [], which LMDeploy and TensorRT-LLM need.
transformers takes this configuration for its own block layout and loads nonsense without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from swiftfp8.export.layers import Decision, ModelLayers
from swiftfp8.export.layout import Fault, FormatOptions, LayerError, Layout, WriteJob
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

NAME = "fp8"
STATIC_INPUTS = "optional"
SCHEME = Scheme(format=NAME, granularity="tensor", scale_suffix="_scale", multiple=(16, 16))

KINDS = {
    "modules_to_not_convert": "a list of names",
    "ignored_layers": "a list of names",
    "weight_block_size": "a list of lengths",
}


def describe(source: Source, options: FormatOptions) -> Layout:
    """Quantize every linear whose dimensions are multiples of 16, with its fused siblings."""
    section = partial(_section, static=options.input_amax is not None)
    return describe_weights(SCHEME, source, options, section)


def write(source: Source, layout: Layout, directory: Path, job: WriteJob) -> tuple[LayerError, ...]:
    """Read every weight for its scale, then merge, quantize and write it."""
    return write_weights(SCHEME, source, layout, directory, job)


def reference(source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors, those of quantized linears through FP8 and back."""
    return reference_weights(SCHEME, source, layout)


def verify(directory: Path, layers: ModelLayers) -> list[Fault]:
    """All that headers, bytes and config.json must satisfy."""
    section = layers.config.get("quantization_config")
    if not isinstance(section, Mapping):
        return [Fault(where="config.json", what="has no quantization_config")]
    if odd := odd_types(section, KINDS, "config.json: quantization_config"):
        return odd
    return check_quantized(directory, layers, declared(directory, layers, section, SCHEME))


def declared(
    directory: Path, layers: ModelLayers, section: Mapping[str, Any], scheme: Scheme
) -> Declared:
    """What a section of `quant_method: fp8` says, with its faults; names are taken literally."""
    where = "config.json: quantization_config"
    static = section.get("activation_scheme") == "static" and scheme.granularity == "tensor"
    expected = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    faults = [
        Fault(where=where, what=f"{key} is {section.get(key)!r}, not {value!r}")
        for key, value in expected.items()
        if section.get(key) != value
    ]
    if section.get("fmt", "e4m3") != "e4m3":
        faults.append(Fault(where=where, what=f"fmt is {section['fmt']!r}, not 'e4m3'"))
    listed = section.get("modules_to_not_convert") or section.get("ignored_layers")
    known = module_names(directory, layers)
    if not listed:  # the readers' defaults hold: heads and routers
        listed = [name for name, kind in layers.linears.items() if kind != "linear"]
    return Declared(
        scheme=scheme,
        kept=frozenset(listed) & known,
        unknown=sorted(set(listed) - known),
        where="config.json: modules_to_not_convert",
        static_inputs=static,
        faults=faults,
    )


def _section(source: Source, decisions: tuple[Decision, ...], *, static: bool) -> dict[str, Any]:
    section = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "modules_to_not_convert": kept_names(source, decisions),
    }
    return {"quantization_config": section}

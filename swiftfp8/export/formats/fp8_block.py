"""`quant_method: fp8`, 128 x 128 blocks: DeepSeek-V3's layout, which most engines load.

A quantized linear has `<name>.weight` [N, K] in e4m3 and `<name>.weight_scale_inv`
[ceil(N / 128), ceil(K / 128)] in float32, value = weight * weight_scale_inv of its block;
activations are quantized by the engine as it runs ("dynamic"). Every linear that stays in BF16 is
listed by its full name: one that is not makes vLLM read BF16 bytes as FP8, without a word. The
head is always listed, because an explicit list replaces the readers' defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from swiftfp8.export.formats.fp8 import KINDS, declared
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
from swiftfp8.export.structure import check_quantized

NAME = "fp8_block"
SCHEME = Scheme(format=NAME, granularity="block", scale_suffix="_scale_inv", multiple=BLOCK)


def describe(source: Source, options: FormatOptions) -> Layout:
    """Quantize every linear that fits whole blocks, with its fused siblings."""
    return describe_weights(SCHEME, source, options, _section)


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
    if odd := odd_types(section, KINDS, "config.json: quantization_config"):
        return odd
    said = declared(directory, layers, section, SCHEME)
    if list(section.get("weight_block_size") or ()) != list(BLOCK):
        where = "config.json: quantization_config"
        said.faults.append(Fault(where=where, what=f"weight_block_size is not {list(BLOCK)}"))
    return check_quantized(directory, layers, said)


def _section(source: Source, decisions: tuple[Decision, ...]) -> dict[str, Any]:
    return {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": kept_names(source, decisions),
        }
    }

"""`quant_method: fp8`, 128 x 128 blocks: DeepSeek-V3's layout, which most engines load.

A quantized linear has `<name>.weight` [N, K] in e4m3 and `<name>.weight_scale_inv`
[ceil(N / 128), ceil(K / 128)] in float32, value = weight * weight_scale_inv of its block;
activations are quantized by the engine as it runs ("dynamic"). Every linear that stays in BF16 is
listed by its full name: one that is not makes vLLM read BF16 bytes as FP8, without a word. The
head is always listed, because an explicit list replaces the readers' defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import CheckpointWriter, TensorSpec
from swiftfp8.export.layers import Decision, ModelLayers, decide
from swiftfp8.export.layout import Fault, FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.quantize import (
    BLOCK,
    ErrorMeter,
    QuantizedTensor,
    dequantize,
    quantize_weight,
)
from swiftfp8.export.source import Source
from swiftfp8.export.structure import check_fp8_block

NAME = "fp8_block"
SCALE_SUFFIX = "_scale_inv"


def describe(source: Source, options: FormatOptions) -> Layout:
    """Quantize every linear that fits whole blocks, with its fused siblings."""
    decisions = decide(
        source.layers,
        source.tensors,
        multiple=BLOCK,
        exclude=options.exclude,
        keep=options.keep,
    )
    quantized = frozenset(f"{d.name}.weight" for d in decisions if d.quantize)
    if not quantized:
        reasons = sorted({d.reason for d in decisions if d.reason != "output head"})
        raise SwiftFP8Error(
            f"no linear of this model can be FP8 in 128x128 blocks: {'; '.join(reasons[:3])}",
            where=str(source.directory),
            fix="export with export.format=bf16",
        )
    tensors: list[TensorSpec] = []
    for spec in source.tensors.values():
        tensors += _quantized_specs(spec) if spec.name in quantized else [spec]
    return Layout(
        format=NAME,
        tensors=tuple(tensors),
        quantized=quantized,
        decisions=decisions,
        config={"dtype": "bfloat16", "quantization_config": _config_section(source, decisions)},
    )


def write(source: Source, layout: Layout, directory: Path, job: WriteJob) -> tuple[LayerError, ...]:
    """Merge, quantize and write, a slab of rows at a time."""
    errors = []
    with CheckpointWriter(directory, layout.tensors, job.max_shard_bytes) as writer:
        for name in source.tensors:
            if name in layout.quantized:
                errors.append(_write_quantized(source, name, writer, job))
            else:
                for piece in source.pieces(name, device=job.device):
                    writer.write(name, source.rounded(name, piece))
            job.advance(source.checkpoint.specs[name].nbytes)
    return tuple(errors)


def reference(source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors, those of quantized linears through FP8 and back (exact in BF16)."""
    for name in source.tensors:
        if name in layout.quantized:
            pieces = [
                dequantize(_quantize(name, piece), torch.bfloat16)
                for piece in source.pieces(name, BLOCK[0])
            ]
            yield name, torch.cat(pieces)
        else:
            yield name, source.merged(name)


def verify(directory: Path, layers: ModelLayers) -> list[Fault]:
    """All that headers, bytes and config.json must satisfy."""
    return check_fp8_block(directory, layers)


def _write_quantized(
    source: Source, name: str, writer: CheckpointWriter, job: WriteJob
) -> LayerError:
    meter = ErrorMeter()
    scales = []
    for piece in source.pieces(name, BLOCK[0], job.device):
        exact = piece.to(torch.float32)
        quantized = _quantize(name, exact)
        meter.add(exact, quantized)
        writer.write(name, quantized.data)
        scales.append(quantized.scale.cpu())
    writer.write(name + SCALE_SUFFIX, torch.cat(scales))
    return LayerError(
        name=name.removesuffix(".weight"),
        shape=source.tensors[name].shape,
        relative_error=meter.relative_error,
        sqnr_db=meter.sqnr_db,
    )


def _quantize(name: str, piece: Tensor) -> QuantizedTensor:
    try:
        return quantize_weight(piece, BLOCK)
    except SwiftFP8Error as error:
        raise SwiftFP8Error(error.what, where=name, fix=error.fix) from error


def _quantized_specs(spec: TensorSpec) -> list[TensorSpec]:
    rows, columns = spec.shape
    scale_shape = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    return [
        TensorSpec(name=spec.name, dtype="F8_E4M3", shape=spec.shape),
        TensorSpec(name=spec.name + SCALE_SUFFIX, dtype="F32", shape=scale_shape),
    ]


def _config_section(source: Source, decisions: tuple[Decision, ...]) -> dict[str, Any]:
    heads = {name for name, kind in source.layers.linears.items() if kind == "head"}
    kept = [d.name for d in decisions if not d.quantize and d.name not in heads]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": [*sorted(heads or {"lm_head"}), *kept],
    }

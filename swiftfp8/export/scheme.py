"""FP8 weights and their scales, whatever the format calls them: the part that formats share.

A scheme says which elements of a weight share a scale and what the scale's tensor is called:

    block     [ceil(N / 128), ceil(K / 128)]   one scale per 128 x 128 block
    channel   [N, 1]                           one per output channel (row)
    tensor    []                               one per weight, the same for a fused group

Every scale is float32 and a power of two, as `quantize` explains, and value = data * scale.
Engines fuse q/k/v and gate/up into one matmul with a single scale for a whole tensor: members of
such a group that had scales of their own would be quantized a second time while loading.
Quantization itself happens in one place, `_quantize`, by the layout's quantizer where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import CheckpointWriter, TensorSpec
from swiftfp8.export.layers import Decision, decide, fused_siblings
from swiftfp8.export.layout import FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.quantize import (
    BLOCK,
    FP8_MAX,
    ErrorMeter,
    QuantizedTensor,
    dequantize,
    power_of_two_scale,
    quantize_weight,
    require_finite,
)
from swiftfp8.export.source import Source
from swiftfp8.export.survival import SurvivalMeter

INPUT_SCALE = "input_scale"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Granularity and names. `multiple` is what (N, K) must be divisible by to be FP8."""

    format: str
    granularity: Literal["block", "channel", "tensor"]
    scale_suffix: str
    multiple: tuple[int, int]

    def block(self, columns: int) -> tuple[int, int]:
        """The block that the arithmetic works in: of a whole tensor, row by row."""
        return BLOCK if self.granularity == "block" else (1, columns)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale of a weight [N, K]."""
        if self.granularity == "tensor":
            return ()
        block = self.block(shape[1])
        return (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


def describe_weights(
    scheme: Scheme,
    source: Source,
    options: FormatOptions,
    section: Callable[[Source, tuple[Decision, ...]], Mapping[str, Any]],
) -> Layout:
    """Quantize every linear whose shape fits, with its fused siblings.

    `section` gives what config.json gains. Where `options.input_amax` is given, every quantized
    linear also gets a static scale for its input.
    """
    decisions = decide(
        source.layers,
        source.tensors,
        multiple=scheme.multiple,
        exclude=options.exclude,
        keep=options.keep,
    )
    quantized = frozenset(f"{d.name}.weight" for d in decisions if d.quantize)
    if not quantized:
        reasons = sorted({d.reason for d in decisions if d.reason != "output head"})
        reasons = reasons or ["its weights have other names than transformers expects"]
        raise SwiftFP8Error(
            f"no linear of this model can be FP8 in the format {scheme.format}: "
            f"{'; '.join(reasons[:3])}",
            where=str(source.directory),
            fix="export with export.format=bf16",
        )
    static = options.input_amax is not None
    tensors: list[TensorSpec] = []
    for spec in source.tensors.values():
        if spec.name in quantized:
            tensors += _specs(scheme, spec, static)
        else:
            tensors.append(spec)
    return Layout(
        format=scheme.format,
        tensors=tuple(tensors),
        quantized=quantized,
        decisions=decisions,
        config={"dtype": "bfloat16", **section(source, decisions)},
        quantizer=options.quantizer,
        input_amax=options.input_amax,
    )


def write_weights(
    scheme: Scheme, source: Source, layout: Layout, directory: Path, job: WriteJob
) -> tuple[LayerError, ...]:
    """Merge, quantize and write, a slab of rows at a time."""
    errors = []
    shared = _shared_scales(scheme, source, layout, job.device)
    with CheckpointWriter(directory, layout.tensors, job.max_shard_bytes) as writer:
        for name in source.tensors:
            if name in layout.quantized:
                errors.append(_write(scheme, source, layout, name, writer, job, shared))
            else:
                for piece in source.pieces(name, device=job.device):
                    writer.write(name, source.rounded(name, piece))
            job.advance(source.checkpoint.specs[name].nbytes)
    return tuple(errors)


def reference_weights(
    scheme: Scheme, source: Source, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors, those of quantized linears through FP8 and back (exact in BF16)."""
    shared = _shared_scales(scheme, source, layout, "cpu")
    for name in source.tensors:
        if name in layout.quantized:
            pieces = [
                dequantize(quantized, torch.bfloat16)
                for _, quantized in _quantized(scheme, source, layout, name, "cpu", shared)
            ]
            yield name, torch.cat(pieces)
        else:
            yield name, source.merged(name)


def kept_names(source: Source, decisions: Sequence[Decision]) -> list[str]:
    """Full names of the linears that stay in BF16, the head always and first.

    Where transformers' classes have another name for a module, both are listed.
    """
    layers = source.layers
    heads = {name for name, kind in layers.linears.items() if kind == "head"}
    kept = [d.name for d in decisions if not d.quantize and d.name not in heads]
    other_names = [layers.aliases[name] for name in kept if name in layers.aliases]
    return [*sorted(heads or {"lm_head"}), *kept, *other_names]


def _write(
    scheme: Scheme,
    source: Source,
    layout: Layout,
    name: str,
    writer: CheckpointWriter,
    job: WriteJob,
    shared: Mapping[str, Tensor],
) -> LayerError:
    meter = ErrorMeter()
    survival = SurvivalMeter()
    scales = []
    row = 0
    for exact, quantized in _quantized(scheme, source, layout, name, job.device, shared):
        meter.add(exact, quantized)
        update = source.checkpoint.update(name, row, row + exact.shape[0], job.device)
        if update is not None:
            survival.add(exact, update, quantized)
        row += exact.shape[0]
        writer.write(name, quantized.data)
        scales.append(quantized.scale.cpu())
    scale = shared[name] if name in shared else torch.cat(scales)
    writer.write(name + scheme.scale_suffix, scale)
    module = name.removesuffix(".weight")
    if layout.input_amax is not None:
        scale = torch.tensor(layout.input_amax[module] / FP8_MAX, dtype=torch.float32)
        writer.write(f"{module}.{INPUT_SCALE}", scale)
    return LayerError(
        name=module,
        shape=source.tensors[name].shape,
        relative_error=meter.relative_error,
        sqnr_db=meter.sqnr_db,
        survival=survival.share,
    )


def _quantized(
    scheme: Scheme,
    source: Source,
    layout: Layout,
    name: str,
    device: torch.device | str,
    shared: Mapping[str, Tensor],
) -> Iterator[tuple[Tensor, QuantizedTensor]]:
    """Each piece of a weight in float32, and the same quantized."""
    block = scheme.block(source.tensors[name].columns)
    first_row = 0
    for piece in source.pieces(name, block[0], device):
        exact = piece.to(torch.float32)
        given = None
        if name in shared:
            given = shared[name].to(exact.device).expand(exact.shape[0], 1)
        yield exact, _quantize(layout, name, first_row, exact, block, given)
        first_row += exact.shape[0]


def _quantize(
    layout: Layout,
    name: str,
    first_row: int,
    weight_NK: Tensor,
    block: tuple[int, int],
    scale: Tensor | None,
) -> QuantizedTensor:
    """The one place where a weight becomes FP8."""
    try:
        if layout.quantizer is not None:
            return layout.quantizer(name, first_row, weight_NK, block, scale)
        return quantize_weight(weight_NK, block, scale)
    except SwiftFP8Error as error:
        raise SwiftFP8Error(error.what, where=name, fix=error.fix) from error


def _shared_scales(
    scheme: Scheme, source: Source, layout: Layout, device: torch.device | str
) -> dict[str, Tensor]:
    """The scale [] of every weight where a scheme has one per tensor; {} for other schemes."""
    if scheme.granularity != "tensor":
        return {}
    amax: dict[str, Tensor] = {}
    for name in source.tensors:
        if name in layout.quantized:
            parts = [piece.abs().amax() for piece in source.pieces(name, 1, device)]
            amax[name] = torch.stack(parts).amax().to("cpu", torch.float32)
            require_finite(amax[name])
    scales = {}
    for name in amax:
        group = [f"{member}.weight" for member in fused_siblings(name.removesuffix(".weight"))]
        members = [amax[member] for member in group if member in amax] or [amax[name]]
        scales[name] = power_of_two_scale(torch.stack(members).amax())[0]
    return scales


def _specs(scheme: Scheme, spec: TensorSpec, static: bool) -> list[TensorSpec]:
    scale = TensorSpec(
        name=spec.name + scheme.scale_suffix, dtype="F32", shape=scheme.scale_shape(spec.shape)
    )
    specs = [TensorSpec(name=spec.name, dtype="F8_E4M3", shape=spec.shape), scale]
    if static:
        module = spec.name.removesuffix(".weight")
        specs.append(TensorSpec(name=f"{module}.{INPUT_SCALE}", dtype="F32", shape=()))
    return specs

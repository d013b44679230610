"""FP8 weights and their scales, whatever the format calls them: the part that formats share.

A scheme says which elements of a weight share a scale and what the scale's tensor is called:

    block     [ceil(N / 128), ceil(K / 128)]   one scale per 128 x 128 block
    channel   [N, 1]                           one per output channel (row)
    tensor    []                               one per weight, the same for a fused group

Every scale is float32 and, but for channels, a power of two, as `scales` explains, and
value = data * scale.
Engines fuse q/k/v and gate/up into one matmul with a single scale for a whole tensor: members of
such a group that had scales of their own would be quantized a second time while loading.
Quantization itself happens in one place, `_quantize`, by the layout's quantizer where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
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
    quantize_weight,
    require_finite,
)
from swiftfp8.export.scales import power_of_two_scale
from swiftfp8.export.source import Source
from swiftfp8.export.stream import Piece, in_order, pieces_of, rounded, to_host
from swiftfp8.export.survival import SurvivalMeter

INPUT_SCALE = "input_scale"
KV_SCALES = ("k_scale", "v_scale")
_WRITTEN = torch.empty(0)  # stands for data that need not be kept


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Granularity and names. `multiple` is what (N, K) must be divisible by to be FP8.

    `input_scale_shape` is that of a static scale of a linear's input, which is one number.
    """

    format: str
    granularity: Literal["block", "channel", "tensor"]
    scale_suffix: str
    multiple: tuple[int, int]
    input_scale_shape: tuple[int, ...] = ()

    def block(self, columns: int) -> tuple[int, int]:
        """The block that the arithmetic works in: of a whole tensor, row by row."""
        return BLOCK if self.granularity == "block" else (1, columns)

    def block_rows(self, source: Source, layout: Layout) -> Callable[[str], int]:
        """How many rows of a tensor belong together, by its name."""
        return lambda name: (
            self.block(source.tensors[name].columns)[0] if name in layout.quantized else 1
        )

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
    linear also gets a static scale for its input; `options.kv_amax` gives scales to the cache.
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
            fix=_other_format(source, options),
        )
    static = options.input_amax is not None
    tensors: list[TensorSpec] = []
    for spec in source.tensors.values():
        if spec.name in quantized:
            tensors += _specs(scheme, spec, static)
        else:
            tensors.append(spec)
    for name in kv_scales(options.kv_amax):
        tensors.append(TensorSpec(name=name, dtype="F32", shape=(1,)))
    return Layout(
        format=scheme.format,
        tensors=tuple(tensors),
        quantized=quantized,
        decisions=decisions,
        config={"dtype": "bfloat16", **section(source, decisions)},
        input_group=BLOCK[1] if scheme.granularity == "block" else 0,
        quantizer=options.quantizer,
        input_amax=options.input_amax,
        kv_amax=options.kv_amax,
    )


def _other_format(source: Source, options: FormatOptions) -> str:
    """What to ask for where no linear fits: the format that needs least, if it takes any."""
    needs_least = decide(
        source.layers,
        source.tensors,
        multiple=(16, 16),
        exclude=options.exclude,
        keep=options.keep,
    )
    taken = sum(decision.quantize for decision in needs_least)
    first = f"compressed_tensors, which takes {taken} of its linears, or " if taken else ""
    return f"export with export.format={first}bf16"


def write_weights(
    scheme: Scheme, source: Source, layout: Layout, directory: Path, job: WriteJob
) -> tuple[LayerError, ...]:
    """Merge, quantize and write, a slab of rows at a time."""
    shared = _shared_scales(scheme, source, layout, job.device)
    layers: dict[str, LayerError] = {}
    parts: list[_Made] = []
    with CheckpointWriter(directory, layout.tensors, job.max_shard_bytes, job.journal) as writer:
        todo = [
            name
            for name in source.tensors
            if not writer.has(_outputs(scheme, source, layout, name))
        ]
        job.advance(source.nbytes - sum(source.checkpoint.specs[name].nbytes for name in todo))
        for made in in_order(
            pieces_of(source, todo, scheme.block_rows(source, layout), job.device),
            partial(_make, scheme, source, layout, job.device, shared),
            job.device,
        ):
            name = made.piece.name
            writer.write(name, made.data)
            job.advance(made.piece.nbytes)
            if name not in layout.quantized:
                continue
            parts.append(replace(made, data=_WRITTEN))
            if made.piece.last:
                _write_scales(scheme, layout, name, parts, shared, writer)
                layers[name] = _layer_error(source.tensors[name], parts)
                if job.journal:
                    job.journal.measured(layers[name])
                parts.clear()
        for name, scale in kv_scales(layout.kv_amax).items():
            writer.write(name, torch.tensor([scale], dtype=torch.float32))
    if job.journal:
        layers |= {f"{name}.weight": layer for name, layer in job.journal.layers.items()}
    return tuple(layers[name] for name in source.tensors if name in layers)


def reference_weights(
    scheme: Scheme, source: Source, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors, those of quantized linears through FP8 and back (exact in BF16)."""
    shared = _shared_scales(scheme, source, layout, "cpu")

    def restore(piece: Piece) -> tuple[Piece, Tensor]:
        if piece.name not in layout.quantized:
            return piece, rounded(source, piece, "cpu")
        _, quantized = _quantized(scheme, source, layout, "cpu", shared, piece)
        return piece, dequantize(quantized, torch.bfloat16)

    parts: list[Tensor] = []
    pieces = pieces_of(source, source.tensors, scheme.block_rows(source, layout))
    for piece, part in in_order(pieces, restore):
        parts.append(part)
        if piece.last:
            yield piece.name, torch.cat(parts).view(source.tensors[piece.name].shape)
            parts.clear()


def kv_scales(kv_amax: Mapping[str, tuple[float, float]] | None) -> dict[str, float]:
    """Scales of an FP8 cache by tensor name: the largest key or value seen becomes 448."""
    return {
        f"{module}.{name}": amax / FP8_MAX
        for module, pair in (kv_amax or {}).items()
        for name, amax in zip(KV_SCALES, pair, strict=True)
    }


def kept_names(source: Source, decisions: Sequence[Decision]) -> list[str]:
    """Full names of the linears that stay in BF16, the head always and first.

    Where transformers' classes have another name for a module, both are listed.
    """
    layers = source.layers
    heads = {name for name, kind in layers.linears.items() if kind == "head"}
    kept = [d.name for d in decisions if not d.quantize and d.name not in heads]
    other_names = [layers.aliases[name] for name in kept if name in layers.aliases]
    usual = {"lm_head"} if layers.speaks else set()
    return [*sorted(heads or usual), *kept, *other_names]


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A piece as it is written, in CPU memory; where it is quantized, its scales and its cost."""

    piece: Piece
    data: Tensor
    scale: Tensor | None = None
    error: ErrorMeter = field(default_factory=ErrorMeter)
    survival: SurvivalMeter = field(default_factory=SurvivalMeter)


def _make(
    scheme: Scheme,
    source: Source,
    layout: Layout,
    device: torch.device | str,
    shared: Mapping[str, Tensor],
    piece: Piece,
) -> _Made:
    if piece.name not in layout.quantized:
        return _Made(piece=piece, data=to_host(rounded(source, piece, device)))
    exact, quantized = _quantized(scheme, source, layout, device, shared, piece)
    made = _Made(piece=piece, data=to_host(quantized.data), scale=quantized.scale.cpu())
    made.error.add(exact, quantized)
    update = source.checkpoint.update(piece.name, piece.start, piece.stop, device)
    if update is not None:
        made.survival.add(exact, update, quantized)
    return made


def _quantized(
    scheme: Scheme,
    source: Source,
    layout: Layout,
    device: torch.device | str,
    shared: Mapping[str, Tensor],
    piece: Piece,
) -> tuple[Tensor, QuantizedTensor]:
    """A piece of a weight, float32 or as it is stored, and the same quantized."""
    name = piece.name
    exact = source.checkpoint.rows(name, piece.start, piece.stop, device)
    given = shared[name].to(device).expand(exact.shape[0], 1) if name in shared else None
    block = scheme.block(exact.shape[1])
    return exact, _quantize(layout, name, piece.start, exact, block, given)


def _write_scales(
    scheme: Scheme,
    layout: Layout,
    name: str,
    parts: Sequence[_Made],
    shared: Mapping[str, Tensor],
    writer: CheckpointWriter,
) -> None:
    scales = [part.scale for part in parts if part.scale is not None]
    writer.write(name + scheme.scale_suffix, shared[name] if name in shared else torch.cat(scales))
    module = name.removesuffix(".weight")
    if layout.input_amax is not None:
        scale = torch.tensor(layout.input_amax[module] / FP8_MAX, dtype=torch.float32)
        writer.write(f"{module}.{INPUT_SCALE}", scale.view(scheme.input_scale_shape))


def _layer_error(spec: TensorSpec, parts: Sequence[_Made]) -> LayerError:
    error, survival = ErrorMeter(), SurvivalMeter()
    for part in parts:
        error.include(part.error)
        survival.include(part.survival)
    return LayerError(
        name=spec.name.removesuffix(".weight"),
        shape=spec.shape,
        relative_error=error.relative_error,
        sqnr_db=error.sqnr_db,
        survival=survival.share,
    )


def _outputs(scheme: Scheme, source: Source, layout: Layout, name: str) -> list[str]:
    """Names of the tensors that a source tensor becomes."""
    if name not in layout.quantized:
        return [name]
    specs = _specs(scheme, source.tensors[name], layout.input_amax is not None)
    return [spec.name for spec in specs]


def _quantize(
    layout: Layout,
    name: str,
    first_row: int,
    weight_NK: Tensor,
    block: tuple[int, int],
    scale: Tensor | None,
) -> QuantizedTensor:
    """The one place where a weight becomes FP8."""
    with _naming(name):
        if layout.quantizer is not None:
            return layout.quantizer(name, first_row, weight_NK.to(torch.float32), block, scale)
        return quantize_weight(weight_NK, block, scale)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the weight's name to an error."""
    try:
        yield
    except SwiftFP8Error as error:
        raise SwiftFP8Error(error.what, where=name, fix=error.fix) from error


def _shared_scales(
    scheme: Scheme, source: Source, layout: Layout, device: torch.device | str
) -> dict[str, Tensor]:
    """The scale [] of every weight where a scheme has one per tensor; {} for other schemes."""
    if scheme.granularity != "tensor":
        return {}
    largest: dict[str, list[Tensor]] = {name: [] for name in source.tensors}

    def amax_of(piece: Piece) -> tuple[str, Tensor]:
        part = source.checkpoint.rows(piece.name, piece.start, piece.stop, device)
        return piece.name, torch.stack([part.amax(), part.amin().neg()]).amax().to("cpu")

    names = [name for name in source.tensors if name in layout.quantized]
    for name, part in in_order(pieces_of(source, names, device=device), amax_of, device):
        largest[name].append(part.to(torch.float32))
    amax = {name: torch.stack(largest[name]).amax() for name in names}
    for name in names:
        with _naming(name):
            require_finite(amax[name])
    scales = {}
    for name in amax:
        group = [f"{member}.weight" for member in fused_siblings(name.removesuffix(".weight"))]
        members = [amax[member] for member in group if member in amax] or [amax[name]]
        scales[name] = power_of_two_scale(torch.stack(members).amax())
    return scales


def _specs(scheme: Scheme, spec: TensorSpec, static: bool) -> list[TensorSpec]:
    scale = TensorSpec(
        name=spec.name + scheme.scale_suffix, dtype="F32", shape=scheme.scale_shape(spec.shape)
    )
    specs = [TensorSpec(name=spec.name, dtype="F8_E4M3", shape=spec.shape), scale]
    if static:
        module = spec.name.removesuffix(".weight")
        specs.append(
            TensorSpec(name=f"{module}.{INPUT_SCALE}", dtype="F32", shape=scheme.input_scale_shape)
        )
    return specs

"""Merged and unquantized: the plain Hugging Face checkpoint in BF16 that any engine loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from swiftfp8.export.checkpoint_io import CheckpointWriter
from swiftfp8.export.layers import ModelLayers
from swiftfp8.export.layout import Fault, FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.source import Source
from swiftfp8.export.structure import check_unquantized

NAME = "bf16"


def describe(source: Source, options: FormatOptions) -> Layout:
    """Every tensor keeps its name and shape."""
    return Layout(
        format=NAME,
        tensors=tuple(source.tensors.values()),
        quantized=frozenset(),
        decisions=(),
        config={"dtype": "bfloat16"},
    )


def write(source: Source, layout: Layout, directory: Path, job: WriteJob) -> tuple[LayerError, ...]:
    """Write merged tensors, rounded once; no layer is quantized, so none has an error."""
    with CheckpointWriter(directory, layout.tensors, job.max_shard_bytes) as writer:
        for spec in layout.tensors:
            for piece in source.pieces(spec.name, device=job.device):
                writer.write(spec.name, source.rounded(spec.name, piece))
            job.advance(source.checkpoint.specs[spec.name].nbytes)
    return ()


def reference(source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors."""
    for spec in layout.tensors:
        yield spec.name, source.merged(spec.name)


def verify(directory: Path, layers: ModelLayers) -> list[Fault]:
    """Files complete, and no FP8 left over."""
    return check_unquantized(directory, layers)

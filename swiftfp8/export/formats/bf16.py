"""Merged and unquantized: the plain Hugging Face checkpoint in BF16 that any engine loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from swiftfp8.export.checkpoint_io import CheckpointWriter
from swiftfp8.export.layers import ModelLayers
from swiftfp8.export.layout import Fault, FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.source import Source
from swiftfp8.export.stream import in_order, pieces_of, rounded, to_host
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
    with CheckpointWriter(directory, layout.tensors, job.max_shard_bytes, job.journal) as writer:
        todo = [spec.name for spec in layout.tensors if not writer.has([spec.name])]
        job.advance(source.nbytes - sum(source.checkpoint.specs[name].nbytes for name in todo))
        made = in_order(
            pieces_of(source, todo, device=job.device),
            lambda piece: (piece, to_host(rounded(source, piece, job.device))),
            job.device,
        )
        for piece, data in made:
            writer.write(piece.name, data)
            job.advance(piece.nbytes)
    return ()


def reference(source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors."""
    for spec in layout.tensors:
        yield spec.name, source.merged(spec.name)


def verify(directory: Path, layers: ModelLayers) -> list[Fault]:
    """Files complete, and no FP8 left over."""
    return check_unquantized(directory, layers)

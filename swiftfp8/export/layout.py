"""What an export format promises: the types between the stage and `formats/`.

A format is a module in `formats/` with the members of `ExportFormat`: `describe` decides, `write`
obeys, `reference` says what a reader must get back, `verify` checks a directory that anybody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftfp8.export.checkpoint_io import ShardJournal, TensorSpec
from swiftfp8.export.layers import Decision, ModelLayers
from swiftfp8.export.quantize import QuantizedTensor
from swiftfp8.export.source import Source


class Quantizer(Protocol):
    """Turns rows of a weight into FP8; what is used instead of plain rounding."""

    def __call__(
        self,
        name: str,
        first_row: int,
        weight_NK: Tensor,
        block: tuple[int, int],
        scale: Tensor | None,
    ) -> QuantizedTensor:
        """Quantize rows [first_row, first_row + N) of the weight `name`, given in float32.

        They are whole blocks of `block`, the last of a weight excepted. `scale` is one per block
        where the format fixes it, else None. The same rows must give the same bytes each time.
        """


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """The user's `exclude` patterns, and a model family's patterns with their reasons.

    `quantizer` replaces plain rounding; `input_amax` maps linears to their input's largest
    magnitude, for formats with static activation scales; `kv_amax` maps attention modules to those
    of their keys and values, for an FP8 cache.
    """

    exclude: Sequence[str] = ()
    keep: Mapping[str, str] = field(default_factory=dict)
    quantizer: Quantizer | None = None
    input_amax: Mapping[str, float] | None = None
    kv_amax: Mapping[str, tuple[float, float]] | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All that is known of an export before its first byte is computed.

    `tensors` are in the order of writing; `quantized` are names of weights in it; `config` is
    merged into config.json, None where the directory is no model by itself. `input_group` is how
    many elements of a linear's input share a scale when it is served on a GPU: 0 is a whole token,
    None leaves inputs alone. `quantizer`, `input_amax` and `kv_amax` are those of the options.
    """

    format: str
    tensors: tuple[TensorSpec, ...]
    quantized: frozenset[str]
    decisions: tuple[Decision, ...]
    config: Mapping[str, Any] | None
    input_group: int | None = None
    quantizer: Quantizer | None = None
    input_amax: Mapping[str, float] | None = None
    kv_amax: Mapping[str, tuple[float, float]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """What quantization cost one weight: ||Q - W|| / ||W|| and the same as SQNR in dB.

    `survival` is the share of an adapter's update that is left, where the base was FP8 already.
    """

    name: str
    shape: tuple[int, ...]
    relative_error: float
    sqnr_db: float
    survival: float | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something wrong with a checkpoint directory. `severity` is "error" or "warning"."""

    where: str
    what: str
    severity: str = "error"


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """How to write: shard size, device of the arithmetic, and whom to tell of bytes read.

    `journal` keeps what is finished for an export that is interrupted and resumed.
    """

    max_shard_bytes: int
    device: torch.device | str = "cpu"
    advance: Callable[[int], None] = lambda count: None
    journal: Journal | None = None


class Journal(ShardJournal, Protocol):
    """A shard journal that also keeps what quantization cost the layers in it."""

    @property
    def layers(self) -> Mapping[str, LayerError]:
        """Layers by name, of this and earlier attempts."""

    def measured(self, layer: LayerError) -> None:
        """Note a layer; it is kept with the next shard that is complete."""


class ExportFormat(Protocol):
    """A module of `formats/`."""

    NAME: str

    def describe(self, source: Source, options: FormatOptions) -> Layout:
        """Decide what every tensor becomes; SwiftFP8Error where this model can't be exported."""

    def write(
        self, source: Source, layout: Layout, directory: Path, job: WriteJob
    ) -> tuple[LayerError, ...]:
        """Write the weights into `directory`; what quantization cost, layer by layer."""

    def reference(self, source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a reader of the export must get, computed again from the source."""

    def verify(self, directory: Path, layers: ModelLayers) -> list[Fault]:
        """Faults of a directory of this format, from its headers and bytes."""

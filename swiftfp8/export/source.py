"""What an export reads: a model directory, an adapter on it, and what its class says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import FLOATS, TensorSpec, read_json
from swiftfp8.export.fp8_reader import open_tensors
from swiftfp8.export.layers import ModelLayers, inspect_model, meta_model
from swiftfp8.export.merge import MergedCheckpoint, load_adapter
from swiftfp8.export.quantize import slabs
from swiftfp8.models.quiet import quiet_transformers


@dataclass(frozen=True, kw_only=True)
class Source:
    """A base with its adapter merged on the fly. `tensors` are those an export writes, in order.

    `tensors` has the base's specs with the dtypes that an unquantized export gives them; a tied
    tensor that only repeats another is left out.
    """

    directory: Path
    checkpoint: MergedCheckpoint
    layers: ModelLayers
    tensors: Mapping[str, TensorSpec]
    trust_remote_code: bool

    @property
    def nbytes(self) -> int:
        """Bytes that reading every tensor takes."""
        return sum(self.checkpoint.specs[name].nbytes for name in self.tensors)

    def pieces(
        self, name: str, block_rows: int = 1, device: torch.device | str = "cpu"
    ) -> Iterator[Tensor]:
        """The merged tensor in pieces of whole blocks of rows: float32 where LoRA changed it."""
        spec = self.checkpoint.specs[name]
        for start, stop in slabs(spec.rows, spec.columns, block_rows, device):
            yield self.checkpoint.rows(name, start, stop, device)

    def merged(self, name: str) -> Tensor:
        """The whole merged tensor as an unquantized export holds it."""
        return torch.cat([self.rounded(name, piece) for piece in self.pieces(name)]).view(
            self.tensors[name].shape
        )

    def rounded(self, name: str, piece: Tensor) -> Tensor:
        """A piece of a merged tensor, cast to what an unquantized export holds; a row at least."""
        cast = piece.to(self.tensors[name].torch_dtype)
        return cast if cast.dim() else cast[None]


def open_source(
    model_dir: Path, adapter_dir: Path | None = None, *, trust_remote_code: bool = False
) -> Source:
    """Open a base and an adapter, and check that they fit.

    Raises:
        SwiftFP8Error: missing or damaged files, an adapter of another model, a base quantized in
            a way that is not FP8.
    """
    layers = inspect_model(model_dir, trust_remote_code=trust_remote_code)
    adapter = load_adapter(adapter_dir) if adapter_dir else None
    if adapter and layers.tied and adapter.replaced:
        for name in (*layers.tied, *layers.tied.values()):
            if name in adapter.replaced:
                raise SwiftFP8Error(
                    f"the adapter replaces {name}, which this model ties to another tensor",
                    where=str(adapter_dir),
                    fix="train without it in modules_to_save, or on a model with untied weights",
                )
    reader = open_tensors(model_dir, read_json(model_dir / "config.json"))
    checkpoint = MergedCheckpoint(reader, adapter)
    names = [name for name in checkpoint.specs if not _repeats(name, checkpoint, layers)]
    main_dtype = _main_dtype(checkpoint.specs)
    tensors = {name: _exported_spec(checkpoint.specs[name], main_dtype, layers) for name in names}
    return Source(
        directory=model_dir,
        checkpoint=checkpoint,
        layers=layers,
        tensors=tensors,
        trust_remote_code=trust_remote_code,
    )


def build_model(
    source: Source,
    tensors: Iterator[tuple[str, Tensor]],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Any:
    """The transformers model of `source` with the weights `tensors`, in evaluation mode.

    Loaded the way that transformers loads a checkpoint, by name, from memory.
    """
    config, empty = meta_model(source.directory, source.trust_remote_code)
    config.dtype = dtype
    with quiet_transformers():
        model, info = type(empty).from_pretrained(
            None, config=config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True
        )
    unknown = sorted([*info["missing_keys"], *info["unexpected_keys"]])
    if unknown:
        raise SwiftFP8Error(
            f"transformers does not recognise these tensors: {', '.join(map(str, unknown[:3]))}",
            where=str(source.directory),
            fix="the files do not belong to the architecture that config.json names",
        )
    return model.to(device).eval()


def _exported_spec(spec: TensorSpec, main_dtype: str, layers: ModelLayers) -> TensorSpec:
    """BF16 for what is stored in the model's main dtype; what stands out on purpose stays."""
    if spec.dtype not in FLOATS or (spec.dtype == "F32" and main_dtype != "F32"):
        return spec
    if spec.dtype == "F32" and any(pattern in spec.name for pattern in layers.keep_fp32):
        return spec
    return TensorSpec(name=spec.name, dtype="BF16", shape=spec.shape)


def _main_dtype(specs: Mapping[str, TensorSpec]) -> str:
    """The float dtype that most bytes have."""
    totals: dict[str, int] = {}
    for spec in specs.values():
        if spec.dtype in FLOATS:
            totals[spec.dtype] = totals.get(spec.dtype, 0) + spec.nbytes
    return max(totals, key=lambda dtype: totals[dtype], default="BF16")


def _repeats(name: str, checkpoint: MergedCheckpoint, layers: ModelLayers) -> bool:
    """True for a tied tensor whose twin is stored too; an error where the two differ."""
    twin = layers.tied.get(name)
    if twin is None or twin not in checkpoint.specs:
        return False
    spec, other = checkpoint.specs[name], checkpoint.specs[twin]
    same = (spec.shape, spec.dtype) == (other.shape, other.dtype) and all(
        torch.equal(checkpoint.rows(name, start, stop), checkpoint.rows(twin, start, stop))
        for start, stop in slabs(spec.rows, spec.columns, 1)
    )
    if not same:
        raise SwiftFP8Error(
            f"config.json ties {name} to {twin}, but the weights hold two different tensors",
            where=str(checkpoint.base.directory),
            fix="set tie_word_embeddings to false in config.json if the head is its own",
        )
    return True

"""A quantized checkpoint read as the BF16 one that it stands for.

value = data * scale in float32, where the scale of an FP8 weight `<name>.weight` [N, K] is

    <name>.weight_scale_inv [ceil(N / block), ceil(K / block)]   one per block (quant_method fp8)
    <name>.weight_scale     [N, 1] or [N], [1] or []             one per row, one per weight

Rows are read and dequantized a slab at a time; N and K need not be multiples of the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import FLOATS, CheckpointReader, TensorSpec
from swiftfp8.export.quantize import BLOCK

_SUFFIXES = ("_scale_inv", "_scale")
_OTHER_SCALES = (".input_scale", ".input_activation_scale", ".k_scale", ".v_scale")


class TensorReader(Protocol):
    """The tensors of a checkpoint, and any rows of them."""

    directory: Path
    specs: dict[str, TensorSpec]

    def rows(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Rows [start, stop) of a tensor, on `device`."""


def open_tensors(directory: Path, config: Mapping[str, Any]) -> TensorReader:
    """The reader that fits what config.json says of the weights."""
    section = config.get("quantization_config")
    reader = CheckpointReader(directory)
    if section is None:
        return reader
    block = section.get("weight_block_size") or list(BLOCK)
    if not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise SwiftFP8Error(
            f"weight_block_size is {block!r}, not two lengths such as [128, 128]",
            where=f"{directory / 'config.json'}: quantization_config",
            fix="copy config.json again from where the model came from",
        )
    return DequantizingReader(reader, block=tuple(block))


def without_scales(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors that a model has itself, without the scales that stand beside them."""
    return {name: spec for name, spec in specs.items() if not _is_scale(name, specs)}


def _is_scale(name: str, specs: Mapping[str, TensorSpec]) -> bool:
    return name.endswith(_OTHER_SCALES) or any(
        name.endswith(suffix) and name.removesuffix(suffix) in specs for suffix in _SUFFIXES
    )


class DequantizingReader:
    """FP8 weights as float32 rows of specs that say BF16; their scales are not listed.

    Raises:
        SwiftFP8Error: an FP8 weight without a scale, or with one of a type, shape or value that
            can't be meant.
    """

    def __init__(self, stored: CheckpointReader, block: tuple[int, ...] = BLOCK) -> None:
        self.directory = stored.directory
        self.specs: dict[str, TensorSpec] = {}
        self._stored = stored
        self._block = block
        self._scales: dict[str, str] = {}
        for spec in stored.specs.values():
            if spec.dtype == "F8_E4M3":
                scale = _scale_of(spec, stored.specs, block, stored.directory)
                _require_positive(scale, stored)
                self._scales[spec.name] = scale
        hidden = set(self._scales.values())
        for name, spec in stored.specs.items():
            if name in self._scales:
                self.specs[name] = TensorSpec(name=name, dtype="BF16", shape=spec.shape)
            elif name not in hidden and not name.endswith(_OTHER_SCALES):
                self.specs[name] = spec

    @property
    def quantized(self) -> frozenset[str]:
        """Names of the weights that are FP8 on disk."""
        return frozenset(self._scales)

    def rows(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Rows [start, stop): float32 for FP8 weights, as stored for others."""
        data = self._stored.rows(name, start, stop, device)
        if name not in self._scales:
            return data
        scale = self._stored.rows(self._scales[name], device=device).to(torch.float32)
        end = start + data.shape[0]
        return data.to(torch.float32).mul_(self._expand(scale, self.specs[name], start, end))

    def close(self) -> None:
        """Close the file that is open, if one is."""
        self._stored.close()

    def _expand(self, scale: Tensor, spec: TensorSpec, start: int, stop: int) -> Tensor:
        """The scale in a shape that rows [start, stop) can be multiplied with."""
        if scale.numel() == 1:
            return scale.reshape(1, 1)
        if scale.numel() == spec.rows and scale.shape[0] == spec.rows:
            return scale.reshape(-1, 1)[start:stop]
        rows = torch.arange(start, stop, device=scale.device) // self._block[0]
        return scale[rows].repeat_interleave(self._block[1], 1)[:, : spec.columns]


def _require_positive(name: str, stored: CheckpointReader) -> None:
    dtype = stored.specs[name].dtype
    if dtype not in FLOATS:
        what = f"{name} is {dtype}: only scales in float32, float16 or bfloat16 are understood"
    elif not bool((values := stored.rows(name)).isfinite().logical_and_(values > 0).all()):
        what = f"{name} holds scales that are not positive and finite"
    else:
        return
    raise SwiftFP8Error(
        what,
        where=str(stored.directory),
        fix="download or copy the model again, or give the BF16 model that it was made from",
    )


def _scale_of(
    weight: TensorSpec, specs: Mapping[str, TensorSpec], block: Sequence[int], directory: Path
) -> str:
    found = next((weight.name + s for s in _SUFFIXES if weight.name + s in specs), None)
    if found is None or len(weight.shape) != 2:
        raise SwiftFP8Error(
            f"{weight.name} is FP8 with shape {weight.shape} and "
            f"{'no scale' if found is None else 'can not be dequantized'}",
            where=str(directory),
            fix="`swiftfp8 export verify dir=...` lists what is wrong with it",
        )
    shape = specs[found].shape
    grid = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    rows = weight.shape[0]
    if shape not in ((), (1,), (1, 1), (rows,), (rows, 1), grid):
        raise SwiftFP8Error(
            f"{found} has shape {shape}, which does not fit a weight of shape {weight.shape}",
            where=str(directory),
            fix="`swiftfp8 export verify dir=...` lists what is wrong with it",
        )
    return found

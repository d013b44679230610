"""Weights to FP8 in blocks, and back.

For a block of a weight W (128 x 128 by default) with amax = max |W|:

    scale = smallest power of two >= max(amax, 1e-12) / 448
    data  = e4m3(clamp(W / scale, -448, 448))        W is about data * scale

448 is the largest finite e4m3 value. The rounding of the scale up to a power of two costs nothing
measurable (2.66% against 2.64% relative error on a Gaussian) and makes W / scale and data * scale
exact, so that a serving engine may keep the scale as a bare exponent (UE8M0) without quantizing
again. With a power-of-two scale the only rounding is the cast, and the scale comes from the bits
of the float32 amax, not from a logarithm: a CPU and a GPU give the same bytes.

Shapes: W [N, K], data [N, K], scale [ceil(N / 128), ceil(K / 128)] float32, named
`weight_scale_inv` on disk (as DeepSeek-V3's checkpoints name the factor that data is multiplied
with). Blocks of (1, K) are one scale per output channel; one scale for a whole tensor is the same
scale given for every row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error

FP8_MAX = 448.0
AMAX_FLOOR = 1e-12
FP8 = torch.float8_e4m3fn
BLOCK = (128, 128)
_SLAB_ELEMENTS = 1 << 20  # 4 MiB of float32: a slab and its temporaries stay in the cache
_MANTISSA_BITS = 23
_MANTISSA_OF_1_75 = 0x600000  # 448 = 1.75 * 2**8


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A quantized matrix: `data` [N, K] e4m3, `scale` one float32 per block of `block_shape`."""

    data: Tensor
    scale: Tensor
    block_shape: tuple[int, int]


def quantize_weight(
    weight_NK: Tensor, block: tuple[int, int] = BLOCK, scale: Tensor | None = None
) -> QuantizedTensor:
    """Quantize a matrix in blocks; any float dtype in, math in float32.

    `scale` [ceil(N / block rows), ceil(K / block columns)] replaces the scales that the weight
    itself would give.

    Raises:
        SwiftFP8Error: the weight holds NaN or infinity.
    """
    rows, columns = weight_NK.shape
    data = torch.empty(rows, columns, dtype=FP8, device=weight_NK.device)
    scales = []
    for start, stop in slabs(rows, columns, block[0]):
        given = None if scale is None else scale[start // block[0] : -(-stop // block[0])]
        part = _quantize_slab(weight_NK[start:stop].to(torch.float32), block, given)
        data[start:stop] = part.data
        scales.append(part.scale)
    return QuantizedTensor(data=data, scale=torch.cat(scales), block_shape=block)


def dequantize(quantized: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix [N, K] that a reader of the checkpoint gets: data * scale, cast to `dtype`."""
    rows, columns = quantized.data.shape
    block_rows, block_columns = quantized.block_shape
    out = torch.empty(rows, columns, dtype=dtype, device=quantized.data.device)
    for start, stop in slabs(rows, columns, block_rows):
        scale = quantized.scale[start // block_rows : -(-stop // block_rows)]
        scale = scale.repeat_interleave(block_rows, 0)[: stop - start]
        scale = scale.repeat_interleave(block_columns, 1)[:, :columns]
        out[start:stop] = quantized.data[start:stop].to(torch.float32) * scale
    return out


def power_of_two_scale(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and 1 / scale, both exact powers of two, of float32 `amax`, by integer arithmetic.

    amax = (1 + m) * 2**x fits under 448 * 2**e = 1.75 * 2**(e + 8) where e = x - 8, or x - 7 if
    1 + m > 1.75.
    """
    bits = amax.to(torch.float32).clamp(min=AMAX_FLOOR).view(torch.int32)
    mantissa = bits & ((1 << _MANTISSA_BITS) - 1)
    exponent = (bits >> _MANTISSA_BITS) - 127 - 8 + (mantissa > _MANTISSA_OF_1_75).to(torch.int32)
    scale = ((exponent + 127) << _MANTISSA_BITS).view(torch.float32)
    inverse = ((127 - exponent) << _MANTISSA_BITS).view(torch.float32)
    return scale, inverse


@dataclass
class ErrorMeter:
    """Adds up how far quantized slabs are from what they stand for."""

    error: float = 0.0  # sum of squared differences
    signal: float = 0.0  # sum of squared values

    def add(self, exact: Tensor, quantized: QuantizedTensor) -> None:
        """Count a slab: `exact` is the float32 weight that `quantized` was made from."""
        difference = dequantize(quantized).sub_(exact).flatten()
        flat = exact.flatten()
        self.error += float(torch.dot(difference, difference))
        self.signal += float(torch.dot(flat, flat))

    @property
    def relative_error(self) -> float:
        """||data * scale - W|| / ||W||, 0 for an all-zero weight."""
        return math.sqrt(self.error / self.signal) if self.signal else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise in dB; infinite where nothing was lost."""
        if self.error == 0.0 or self.signal == 0.0:
            return math.inf
        return 10.0 * math.log10(self.signal / self.error)


def slabs(rows: int, columns: int, block_rows: int) -> Iterator[tuple[int, int]]:
    """Row ranges of about a million elements, each a whole number of blocks but the last."""
    step = max(1, _SLAB_ELEMENTS // max(1, columns * block_rows)) * block_rows
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def require_finite(amax: Tensor) -> None:
    """Raise where a weight with these largest magnitudes can't be quantized."""
    if not bool(torch.isfinite(amax).all()):
        raise SwiftFP8Error(
            "a weight holds NaN or infinity",
            fix="export an earlier checkpoint: this one was damaged in training",
        )


def _quantize_slab(
    weight_NK: Tensor, block: tuple[int, int], given: Tensor | None
) -> QuantizedTensor:
    """Quantize a float32 slab as a whole: blocks become axes 1 and 3 of a 4D view."""
    rows, columns = weight_NK.shape
    pad_rows, pad_columns = -rows % block[0], -columns % block[1]
    if pad_rows or pad_columns:
        weight_NK = torch.nn.functional.pad(weight_NK, (0, pad_columns, 0, pad_rows))
    grid = (weight_NK.shape[0] // block[0], weight_NK.shape[1] // block[1])
    blocks = weight_NK.reshape(grid[0], block[0], grid[1], block[1])
    amax = torch.maximum(blocks.amax((1, 3)), blocks.amin((1, 3)).neg())
    require_finite(amax)
    if given is None:
        scale, inverse = power_of_two_scale(amax)
    else:
        scale, inverse = given, given.reciprocal()
    scaled = (blocks * inverse[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    data = scaled.to(FP8).view(weight_NK.shape)[:rows, :columns]
    return QuantizedTensor(data=data, scale=scale, block_shape=block)

"""FP8 quantizers in plain PyTorch: the reference that every backend is held against.

A block of values shares one scale s. With m the format's largest value (448 for e4m3, 57344 for
e5m2) and amax = max |x| over the block, at least 1e-12,

    s = amax / m        q = cast(clamp(x / s, -m, m))        dq(q) = q · s

| recipe | activations, gradients | weights | s |
|---|---|---|---|
| fp8_current | whole tensor | whole tensor | float32 |
| fp8_delayed | whole tensor, amax from earlier steps | whole tensor | float32 |
| fp8_block | 1 x 128 along the matmul's inner dimension | 128 x 128 | 2^k, rounded up |
| mxfp8 | 1 x 32 along the matmul's inner dimension | 1 x 32 | 2^k, rounded up (E8M0) |

These are Transformer Engine's defaults on Hopper (common/recipe/__init__.py: Float8BlockScaling
has power_2_scale=True). The clamp comes before the cast because a cast alone overflows to NaN in
older PyTorch. A block with NaN or infinity in it stays non-finite: it must be seen, not hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from swiftfp8.plan import RecipeOptions

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
AMAX_EPSILON = 1e-12
ACTIVATION_BLOCK = {"fp8_block": (1, 128), "mxfp8": (1, 32)}
WEIGHT_BLOCK = {"fp8_block": (128, 128), "mxfp8": (1, 32)}


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """FP8 `data` [rows, columns] and its float32 `scale` [row blocks, column blocks].

    `block` is (rows, columns) of one block, None where one scale serves the whole tensor.
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int] | None

    def dequantize(self) -> torch.Tensor:
        """data · scale, float32, [rows, columns]."""
        values = self.data.to(torch.float32)
        if self.block is None:
            return values * self.scale
        tiles = _tiles(values, self.block) * self.scale[:, None, :, None]
        return _untile(tiles, values.shape)

    def transpose(self) -> Quantized:
        """The same numbers with rows and columns exchanged."""
        block = None if self.block is None else (self.block[1], self.block[0])
        return Quantized(data=self.data.t(), scale=self.scale.t(), block=block)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] | None = None,
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
    margin: int = 0,
) -> Quantized:
    """Quantize x [rows, columns] to `dtype`.

    Args:
        x: any floating dtype; the arithmetic is float32.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        block: rows and columns that share a scale; None for the whole tensor.
        power_of_two: round scales up to powers of two.
        amax: use this instead of the tensor's own (delayed scaling); whole tensor only.
        margin: leave a headroom of 2**margin (delayed scaling).
    """
    assert x.dim() == 2
    values = x.to(torch.float32)
    largest = torch.finfo(dtype).max
    if block is None:
        amax = amax_of(values) if amax is None else amax
        scale = _scale(amax, largest, power_of_two) * 2.0**margin
        scaled = (values / scale).clamp(-largest, largest)
        return Quantized(data=scaled.to(dtype), scale=scale.reshape(1, 1), block=None)
    assert amax is None and margin == 0
    tiles = _tiles(values, block)
    scale = _scale(tiles.abs().amax(dim=(1, 3)), largest, power_of_two)
    scaled = (tiles / scale[:, None, :, None]).clamp(-largest, largest)
    return Quantized(data=_untile(scaled, x.shape).to(dtype), scale=scale, block=block)


def quantize_weight(weight: torch.Tensor, recipe: RecipeOptions) -> Quantized:
    """W [out, in] as the forward matmul of `recipe` sees it."""
    block = WEIGHT_BLOCK.get(recipe.recipe)
    return quantize(weight, E4M3, block=block, power_of_two=block is not None)


def quantize_rows(
    x: torch.Tensor,
    recipe: RecipeOptions,
    *,
    gradient: bool = False,
    amax: torch.Tensor | None = None,
) -> Quantized:
    """x [rows, inner] for a matmul that sums over `inner`: an activation, or a gradient.

    `amax` replaces the tensor's own under delayed scaling.
    """
    block = ACTIVATION_BLOCK.get(recipe.recipe)
    margin = recipe.margin if recipe.recipe == "fp8_delayed" else 0
    return quantize(
        x,
        gradient_dtype(recipe) if gradient else E4M3,
        block=block,
        power_of_two=block is not None,
        amax=amax,
        margin=margin,
    )


def gradient_dtype(recipe: RecipeOptions) -> torch.dtype:
    """e5m2 under "hybrid", e4m3 under "e4m3"."""
    return E5M2 if recipe.fp8_format == "hybrid" else E4M3


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """max |x| as a float32 scalar tensor; 0 for an empty x."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.detach().abs().amax().to(torch.float32)


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantization noise, 10 log10(Σ r² / Σ (r - a)²), in dB; infinite if equal."""
    signal = reference.detach().to(torch.float64)
    noise = signal - approximation.detach().to(torch.float64)
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


def _scale(amax: torch.Tensor, largest: float, power_of_two: bool) -> torch.Tensor:
    scale = amax.clamp_min(AMAX_EPSILON) / largest
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa · 2^exponent, mantissa in [½, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    rounded = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.where(torch.isfinite(scale), rounded, scale)


def _tiles(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """x as [row blocks, rows of a block, column blocks, columns of a block], zero padded."""
    rows, columns = block
    padded = functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _untile(tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    row_blocks, rows, column_blocks, columns = tiles.shape
    flat = tiles.reshape(row_blocks * rows, column_blocks * columns)
    return flat[: shape[0], : shape[1]]

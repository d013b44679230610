"""The reference quantizers: formats, scales, blocks, and the values that break careless ones."""

from __future__ import annotations

import math

import pytest
import torch

from swiftfp8.plan import RecipeOptions
from swiftfp8.precision.recipes import (
    E4M3,
    E5M2,
    gradient_dtype,
    quantize,
    quantize_rows,
    quantize_weight,
    sqnr_db,
)

BLOCKS = [None, (128, 128), (1, 128), (1, 32)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_relative_error_stays_within_half_a_step(dtype: torch.dtype, block) -> None:
    # 3 (e4m3) or 2 (e5m2) mantissa bits: half a step is 2^-4 or 2^-3 of the value, down to the
    # smallest normal number; below it the error is absolute, and smaller than at that number.
    x = normal(256, 256)
    quantized = quantize(x, dtype, block=block, power_of_two=block is not None)
    error = (quantized.dequantize() - x).abs()
    bound = 2.0 ** (-4 if dtype == E4M3 else -3)
    floor = torch.finfo(dtype).smallest_normal * quantized.scale.max()
    assert (error <= bound * torch.maximum(x.abs(), floor) * (1 + 1e-6)).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_largest_value_of_a_block_lands_in_range(block) -> None:
    x = normal(130, 200) * 10
    power_of_two = block is not None
    quantized = quantize(x, E4M3, block=block, power_of_two=power_of_two)
    top = quantized.data.float().abs().max().item()
    assert 224 < top <= 448 if power_of_two else top == 448


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_zeros_stay_zeros_and_finite(dtype: torch.dtype, block) -> None:
    x = normal(256, 256)
    x[:128, :128] = 0
    back = quantize(x, dtype, block=block, power_of_two=block is not None).dequantize()
    assert torch.isfinite(back).all()
    assert (back[:128, :128] == 0).all()
    assert (quantize(torch.zeros(4, 32), dtype, block=block).dequantize() == 0).all()


def test_values_beyond_the_scale_are_clamped_not_nan() -> None:
    # Delayed scaling meets a tensor 100 times larger than its history said.
    x = normal(16, 16)
    small = quantize(x, E4M3, amax=x.abs().amax() / 100)
    assert torch.isfinite(small.dequantize()).all()
    assert small.data.float().abs().max() == 448


@pytest.mark.parametrize("block", BLOCKS)
def test_non_finite_input_stays_visible(block) -> None:
    x = normal(128, 128)
    x[3, 5] = math.nan
    back = quantize(x, E4M3, block=block, power_of_two=block is not None).dequantize()
    assert torch.isnan(back[3, 5])
    x[3, 5] = math.inf
    back = quantize(x, E4M3, block=block, power_of_two=block is not None).dequantize()
    assert not torch.isfinite(back[3, 5])


def test_power_of_two_scales_are_rounded_up() -> None:
    x = torch.tensor([[448.0], [449.0], [896.0], [3.5], [1e-20]])
    scale = quantize(x, E4M3, block=(1, 128), power_of_two=True).scale.flatten()
    tiny = 2.0 ** math.ceil(math.log2(1e-12 / 448))
    assert scale.tolist() == [1.0, 2.0, 2.0, 2.0**-7, tiny]


def test_blocks_scale_apart() -> None:
    x = torch.ones(256, 256)
    x[:128, 128:] = 1000.0
    scale = quantize(x, E4M3, block=(128, 128), power_of_two=True).scale
    assert scale.tolist() == [[2.0**-8, 4.0], [2.0**-8, 2.0**-8]]


def test_ragged_shapes_keep_their_shape_and_values() -> None:
    x = normal(70, 200)
    whole = quantize(x, E4M3, block=(1, 128), power_of_two=True)
    assert whole.data.shape == x.shape and whole.scale.shape == (70, 2)
    tail = quantize(x[:, 128:], E4M3, block=(1, 128), power_of_two=True)
    assert torch.equal(whole.dequantize()[:, 128:], tail.dequantize())


def test_margin_leaves_headroom() -> None:
    x = normal(32, 32)
    delayed = RecipeOptions(recipe="fp8_delayed", margin=2)
    assert quantize_rows(x, delayed).data.float().abs().max() == 448 / 4


def test_hybrid_means_e5m2_for_gradients_only() -> None:
    hybrid = RecipeOptions(recipe="fp8_current")
    assert quantize_rows(normal(4, 4), hybrid).data.dtype == E4M3
    assert quantize_rows(normal(4, 4), hybrid, gradient=True).data.dtype == E5M2
    assert gradient_dtype(RecipeOptions(recipe="fp8_current", fp8_format="e4m3")) == E4M3


def test_blocks_contain_an_outlier_where_one_scale_does_not() -> None:
    # A channel 30,000 times larger: per tensor, the small values fall under e4m3's range.
    weight = normal(256, 256) * 0.02
    weight[7] *= 30_000
    others = torch.arange(256) >= 128

    def error(recipe: str) -> float:
        back = quantize_weight(weight, RecipeOptions(recipe=recipe)).dequantize()
        return sqnr_db(weight[others], back[others])

    assert error("fp8_block") > 30 > 20 > error("fp8_current")


def test_transpose_keeps_the_numbers() -> None:
    quantized = quantize(normal(96, 256), E4M3, block=(1, 128), power_of_two=True)
    assert torch.equal(quantized.transpose().dequantize(), quantized.dequantize().t())


def test_sqnr_of_a_known_noise() -> None:
    assert sqnr_db(torch.ones(10), torch.full((10,), 0.9)) == pytest.approx(20.0, abs=1e-4)
    assert sqnr_db(torch.ones(2), torch.ones(2)) == math.inf

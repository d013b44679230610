"""FP8 in blocks: the scale's arithmetic, the error it costs, shapes that do not fit."""

import math

import pytest
import torch

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.quantize import (
    ErrorMeter,
    dequantize,
    quantize_weight,
)
from swiftfp8.export.scales import power_of_two_scale


def gaussian(rows: int, columns: int, std: float = 0.02) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * std


def test_relative_error_is_that_of_e4m3() -> None:
    """2.66% on a Gaussian (a 3-bit mantissa's rounding); 2.5 to 2.8 leaves room for the sample."""
    weight = gaussian(512, 384)
    meter = ErrorMeter()
    meter.add(weight, quantize_weight(weight))
    assert 0.025 < meter.relative_error < 0.028
    assert meter.sqnr_db == pytest.approx(-20 * math.log10(meter.relative_error))


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (300, 200), (448, 320), (5, 1000)])
def test_edge_blocks_have_a_scale_of_their_own(shape: tuple[int, int]) -> None:
    weight = gaussian(*shape)
    weight[-1, -1] = 1000.0  # in the last block only
    quantized = quantize_weight(weight)
    grid = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    assert quantized.data.shape == shape
    assert quantized.scale.shape == grid
    for row in range(grid[0]):
        for column in range(grid[1]):
            block = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            assert (
                quantized.scale[row, column].item() == power_of_two_scale(block.abs().max()).item()
            )
    relative = (dequantize(quantized) - weight).abs() / weight.abs().clamp(min=1e-6)
    assert relative[-1, -1] <= 2.0**-4  # half a step of a 3-bit mantissa
    assert torch.isfinite(dequantize(quantized)).all()


def test_zero_blocks_and_the_largest_values_are_safe() -> None:
    weight = torch.zeros(256, 256)
    weight[:128, :128] = torch.tensor([3.0e38, -3.0e38]).repeat(128, 64)
    quantized = quantize_weight(weight)
    back = dequantize(quantized)
    assert torch.isfinite(back).all()
    assert (back[128:] == 0).all()
    assert torch.allclose(back[:128, :128], weight[:128, :128], rtol=2.0**-4)
    assert not ((quantized.data.view(torch.uint8) & 0x7F) == 0x7F).any()


def test_quantizing_again_changes_nothing() -> None:
    once = quantize_weight(gaussian(256, 256))
    twice = quantize_weight(dequantize(once))
    assert torch.equal(dequantize(once), dequantize(twice))


def test_dequantized_values_are_exact_in_bfloat16() -> None:
    quantized = quantize_weight(gaussian(128, 256))
    assert torch.equal(dequantize(quantized, torch.bfloat16).float(), dequantize(quantized))


def test_slabs_do_not_show() -> None:
    """A weight of several slabs equals the same weight quantized block row by block row."""
    weight = gaussian(384, 16384)
    whole = quantize_weight(weight)
    for start in range(0, 384, 128):
        part = quantize_weight(weight[start : start + 128])
        assert torch.equal(
            part.data.view(torch.uint8), whole.data[start : start + 128].view(torch.uint8)
        )
        assert torch.equal(part.scale[0], whole.scale[start // 128])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_weights_are_refused(bad: float) -> None:
    weight = gaussian(128, 128)
    weight[3, 5] = bad
    with pytest.raises(SwiftFP8Error, match="NaN or infinity"):
        quantize_weight(weight)

"""Scales: a block's is the smallest power of two, a channel's the best of eight."""

from __future__ import annotations

import math

import pytest
import torch

from swiftfp8.export.quantize import dequantize, quantize_weight
from swiftfp8.export.scales import STEPS, channel_scale, power_of_two_scale


def exact_scale(amax: float) -> float:
    """The smallest power of two >= amax / 448, by exact integer ratios."""
    numerator, denominator = max(amax, 1e-12).as_integer_ratio()
    exponent = -80
    while numerator > 448 * denominator * 2.0**exponent:
        exponent += 1
    return 2.0**exponent


@pytest.mark.parametrize(
    "amax", [0.0, 1e-30, 1e-12, 3e-5, 0.02, 0.875, 1.0, 447.99997, 448.0, 448.00003, 1e4, 3e30]
)
def test_scale_is_the_smallest_power_of_two_that_holds_amax(amax: float) -> None:
    value = torch.tensor([amax])
    scale = power_of_two_scale(value)
    assert scale.item() == exact_scale(max(value.item(), torch.tensor(1e-12).item()))
    assert math.frexp(scale.item())[0] == 0.5


def test_scale_of_many_random_amaxes() -> None:
    generator = torch.Generator().manual_seed(1)
    amax = torch.exp(torch.empty(500).uniform_(-20, 20, generator=generator))
    scale = power_of_two_scale(amax)
    assert scale.tolist() == [exact_scale(value) for value in amax.tolist()]


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16().float()


def squared_error(weight_NK: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    scaled = (weight_NK / scale_N[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (scaled.double() * scale_N[:, None] - weight_NK).square().sum(1)


def amax_of(weight_NK: torch.Tensor) -> torch.Tensor:
    return weight_NK.abs().amax(1)


@pytest.mark.parametrize("columns", [16, 100, 640, 4096])
def test_a_channel_has_the_best_of_eight_scales(columns: int) -> None:
    weight = gaussian(64, columns)
    weight[3] *= 2.0**-13
    weight[5, 0] = 300.0  # an outlier
    amax = amax_of(weight)
    chosen = channel_scale(weight, amax)
    eight = [power_of_two_scale(amax / (1 + i / STEPS)) * (1 + i / STEPS) for i in range(STEPS)]
    errors = torch.stack([squared_error(weight, scale) for scale in eight])
    # Exact but for weights 14 binades below the largest, which count for more than they are.
    assert (squared_error(weight, chosen) <= errors.amin(0) * (1 + 1e-4)).all()
    assert (amax <= 448 * chosen * (1 + 1e-6)).all()


def test_it_errs_less_than_a_power_of_two() -> None:
    """By 11% on Gaussian rows of 640; blocks keep a power of two and with it the larger error."""
    weight = gaussian(256, 640)
    amax = amax_of(weight)
    best = squared_error(weight, channel_scale(weight, amax)).sum()
    power = squared_error(weight, power_of_two_scale(amax)).sum()
    assert best < 0.92 * power


def test_the_weight_that_a_reader_gets_is_exact_in_bf16() -> None:
    weight = gaussian(64, 640)
    quantized = quantize_weight(weight, (1, 640))
    exact = dequantize(quantized)
    assert torch.equal(exact, exact.bfloat16().float())
    steps = torch.frexp(quantized.scale)[0] * 2 * STEPS
    assert torch.equal(steps, steps.round()) and len(steps.unique()) > 4


def test_rows_of_zeros_and_merged_float32_weights() -> None:
    weight = gaussian(8, 640) + 1e-5 * gaussian(8, 640, seed=1)  # not BF16 any more
    weight[2] = 0.0
    quantized = quantize_weight(weight, (1, 640))
    assert torch.isfinite(quantized.scale).all()
    assert torch.equal(dequantize(quantized)[2], torch.zeros(640))
    rounded = quantize_weight(weight.bfloat16().float(), (1, 640))
    assert torch.equal(quantized.scale, rounded.scale)

"""Stochastic rounding to BF16, in PyTorch, by noise that depends on its place alone.

A value is rounded away from zero with the probability of the share of a BF16 step that is cut off,
so its mean is kept. The noise is SplitMix64 of step, parameter and element: nothing is drawn, so a
resumed run goes on bit for bit. (The kernel of precision/kernels/adamw.py follows the same rule
with other noise, Philox's: results of the two agree in the mean, not in their bits.)
"""

from __future__ import annotations

import torch

_CHUNK = 1 << 20  # elements whose noise exists at the same time
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def store_rounded(
    pairs: tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    step: torch.Tensor,
    position: int,
    start: int,
) -> None:
    """Round two flat FP32 tensors into two BF16 ones: (target, value) twice, all of one size.

    `step` is a number on the CPU or on their device, which is not waited for; the elements are
    those from `start` on of the parameter at `position`.
    """
    (first, first_value), (second, second_value) = pairs
    for begin in range(0, first.numel(), _CHUNK):
        part = slice(begin, min(begin + _CHUNK, first.numel()))
        elements = torch.arange(start + part.start, start + part.stop, device=first.device)
        noise = _noise(step, position, elements)
        _round(first[part], first_value[part], (noise >> 16) & 0xFFFF)
        _round(second[part], second_value[part], (noise >> 32) & 0xFFFF)


def _noise(step: torch.Tensor, position: int, elements: torch.Tensor) -> torch.Tensor:
    """64 random bits for each of the elements (int64), as int64."""
    # From a place in SplitMix64's sequence that is random itself, so that none overlap.
    place = _mix((step.to(torch.int64) << 32) + position)
    return _mix(place + elements * _STRIDE)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's bijection; int64 wraps around."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        z = (z ^ _shifted(z, shift)) * factor
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """z >> by, zeros coming in."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _round(target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor) -> None:
    bits = value.view(torch.int32) + noise.to(torch.int32)
    # A GPU's NaN, 0x7fffffff, would be carried into -0.0.
    bits.masked_fill_(value.isnan(), 0x7FC00000)
    target.view(torch.int16).copy_(bits.view(torch.int16)[1::2])  # little-endian: upper halves

"""Rounding a weight to FP8 so that the layer's output on real inputs is kept, not the weight.

Plain rounding minimises ||Q - W||. What the next layer sees is X W^T, and with G = X^T X over real
inputs X [T, K] its error is

    ||X (Q - W)^T||^2 = tr((Q - W) G (Q - W)^T)

Inputs of a language model are far from white, so an error in one column of W can be made good in
others. This is GPTQ's way (Frantar et al., 2022, arXiv:2210.17323, after Optimal Brain Surgeon):
round column by column, those with the largest inputs first; with U the upper Cholesky factor of
inverse(G + damping), U^T U = inverse(G + damping), the error that column i leaves is moved to the
columns that are still to come:

    e = (w_i - q_i) / U_ii          w_j -= U_ij * e      for j after i

The grid is e4m3's, which is not uniform: `q_i` is the cast to e4m3 under the block's scale, and all
that theory asks of the grid is a nearest point. Scales are those of plain rounding.

Shapes: W [N, K], G [K, K] float32. The factorization is float64, the rounding float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swiftfp8.export.quantize import (
    BLOCK,
    FP8,
    FP8_MAX,
    QuantizedTensor,
    dequantize,
    quantize_weight,
)

DAMPING = 0.01  # of the mean of G's diagonal: the paper's choice
_COLUMNS = 128  # columns rounded before the rest of the matrix hears of their errors
_STRONGEST_DAMPING = 10.0


def round_keeping_output(
    weight_NK: Tensor, gram_KK: Tensor, block: tuple[int, int] = BLOCK
) -> QuantizedTensor:
    """Quantize a float32 weight in blocks so that its output on the inputs of `gram_KK` is kept.

    Raises:
        SwiftFP8Error: the weight holds NaN or infinity.
    """
    rows, columns = weight_NK.shape
    scale = quantize_weight(weight_NK, block).scale
    order = torch.argsort(gram_KK.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(gram_KK[order][:, order])
    # columns become rows: the loop works on contiguous memory
    rest_KN = weight_NK.T[order].contiguous()
    scale_KN = scale.T.repeat_interleave(block[0], 1)[:, :rows].contiguous()
    block_of = (order // block[1]).tolist()
    rounded_KN = torch.empty(columns, rows, dtype=FP8, device=weight_NK.device)
    for start in range(0, columns, _COLUMNS):
        stop = min(start + _COLUMNS, columns)
        errors = _round_columns(
            rest_KN[start:stop],
            factor[start:stop, start:stop],
            [scale_KN[block] for block in block_of[start:stop]],
            rounded_KN[start:stop],
        )
        if stop < columns:
            rest_KN[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1.0)
    data = torch.empty(rows, columns, dtype=FP8, device=weight_NK.device)
    data.view(torch.uint8)[:, order] = rounded_KN.view(torch.uint8).T
    return QuantizedTensor(data=data, scale=scale, block_shape=block)


def output_error(weight_NK: Tensor, quantized: QuantizedTensor, gram_KK: Tensor) -> float:
    """||X (Q - W)^T|| / ||X W^T|| from G = X^T X; 0 where the output is zero."""
    signal = _energy(weight_NK, gram_KK)
    if signal <= 0.0:
        return 0.0
    return math.sqrt(max(0.0, _energy(dequantize(quantized) - weight_NK, gram_KK)) / signal)


def _energy(matrix_NK: Tensor, gram_KK: Tensor) -> float:
    return float(torch.sum((matrix_NK @ gram_KK).mul_(matrix_NK), dtype=torch.float64))


def _round_columns(rest: Tensor, factor: Tensor, scales: list[Tensor], rounded: Tensor) -> Tensor:
    """Round a block's columns (rows of `rest`) into `rounded`; the errors for later columns."""
    errors = torch.empty_like(rest)
    inverse_diagonal = factor.diagonal().reciprocal().tolist()
    for i, scale in enumerate(scales):
        data = (rest[i] / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        rounded[i] = data
        torch.sub(rest[i], data.to(torch.float32).mul_(scale), out=errors[i])
        errors[i].mul_(inverse_diagonal[i])
        rest[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1.0)
    return errors


def _inverse_factor(gram_KK: Tensor) -> Tensor:
    """U [K, K] float32, upper, with U^T U = inverse(G + damping * mean(diagonal))."""
    mean = gram_KK.diagonal().mean(dtype=torch.float64)
    if not float(mean) > 0.0:  # no input was ever different from zero: nothing to make good
        return torch.eye(gram_KK.shape[0], device=gram_KK.device)
    damping = DAMPING
    while True:
        damped = gram_KK.to(torch.float64)
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                factor: Tensor = upper.to(torch.float32)
                return factor
        # float32 sums of few inputs can leave G slightly indefinite
        damping *= 10.0
        assert damping <= _STRONGEST_DAMPING, "the inputs' second moments hold NaN"

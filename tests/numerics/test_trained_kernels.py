"""FP8 matmuls with trained weights, alone and as SwiGLU, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from swiftfp8.precision.kernels import quantize, swiglu, trained, transpose

TOKENS, WIDTH, INNER = 192, 96, 224


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return trained.trained_matmul(x, weight, trained.Constants.of(weight))


def fused_swiglu(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return trained.trained_swiglu(x, weights, tuple(map(trained.Constants.of, weights)))


def decibels(ours: torch.Tensor, exact: torch.Tensor) -> float:
    error = (ours.double() - exact).norm()
    return (20 * torch.log10(exact.norm() / error)).item()


def case(seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """x, gate, up and down, and dy: outlier tokens and channels, and tokens that hardly count."""
    torch.manual_seed(seed)
    x = torch.randn(TOKENS, WIDTH)
    x[3] *= 30
    x[:, 7] *= 10
    weights = [torch.randn(INNER, WIDTH) * 0.1, torch.randn(INNER, WIDTH) * 0.1]
    weights.append(torch.randn(WIDTH, INNER) * 0.1)
    weights[1][5] *= 20  # an outlier channel of up
    dy = torch.randn(TOKENS, WIDTH) * 1e-5
    dy[:100] *= 1e-3
    return [x, *weights], dy


def gradients(
    function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], dy: torch.Tensor
) -> list[torch.Tensor]:
    """The function's value and its gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *[leaf.grad for leaf in leaves]]


def test_matmul_against_float64() -> None:
    (x, weight, *_), _ = case()
    dy = torch.randn(TOKENS, INNER) * torch.logspace(-8, -4, TOKENS)[:, None]
    exact = gradients(lambda x, w: x @ w.t(), [x.double(), weight.double()], dy)
    ours = gradients(matmul, [x, weight], dy)
    limits = (25, 20, 20)
    for mine, theirs, limit in zip(ours, exact, limits, strict=True):
        assert decibels(mine, theirs) >= limit


def test_swiglu_against_float64() -> None:
    tensors, dy = case()
    exact = gradients(plain_swiglu, [t.double() for t in tensors], dy)
    ours = gradients(fused_swiglu, tensors, dy)
    limits = (22, 20, 20, 20, 20)  # y goes through two FP8 matmuls and a product
    for mine, theirs, limit in zip(ours, exact, limits, strict=True):
        assert decibels(mine, theirs) >= limit


def test_weights_of_nothing_still_get_a_gradient() -> None:
    (x, weight, *_), _ = case()
    weight[2], weight[9] = 0, 1e-9
    dy = torch.randn(TOKENS, INNER)
    exact = gradients(lambda x, w: x @ w.t(), [x.double(), weight.double()], dy)
    ours = gradients(matmul, [x, weight], dy)
    for row in (2, 9):
        assert decibels(ours[2][row], exact[2][row]) >= 20
    blank = gradients(matmul, [x, torch.zeros_like(weight)], dy)
    assert all(torch.isfinite(t).all() for t in blank)


@pytest.mark.parametrize(("function", "used"), [(matmul, 2), (fused_swiglu, 4)])
def test_no_gradient_at_all_is_zero_and_not_nan(function: Callable[..., Any], used: int) -> None:
    tensors, _ = case()
    inputs = [torch.zeros_like(tensors[0]), *tensors[1:used]]
    nothing = torch.zeros(TOKENS, INNER if used == 2 else WIDTH)
    for gradient in gradients(function, inputs, nothing)[1:]:
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_compiled_is_the_same() -> None:
    """Traced and differentiated as for a GPU, but run by PyTorch's own operators."""
    tensors, dy = case()
    compiled = torch.compile(fused_swiglu, backend="aot_eager")
    ours = gradients(compiled, tensors, dy)
    theirs = gradients(fused_swiglu, tensors, dy)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("columns", [64, 200])
def test_cast_and_turn(columns: int) -> None:
    torch.manual_seed(0)
    x, factor = torch.randn(48, columns), torch.rand(48) * 100
    turned = transpose.cast_transpose_op(x, factor)
    expected = (x * factor[:, None]).clamp(-448, 448).t().to(quantize.E4M3)
    assert torch.equal(turned.float(), expected.float())


def test_rows_of_swiglu() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(48, 2 * INNER)
    m8, sm = swiglu.swiglu_rows_op(gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    assert decibels(quantize.dequantize_rows(m8, sm), functional.silu(gate) * up) >= 28


def plain_swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return (functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

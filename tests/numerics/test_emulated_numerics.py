"""The emulated backend is exactly dequantize-then-matmul, and as close to float64 as FP8 can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from swiftfp8.plan import FP8_RECIPES, LayerPlan, RecipeOptions
from swiftfp8.precision import emulated
from swiftfp8.precision.recipes import quantize_rows, quantize_weight, sqnr_db

OUT, IN, TOKENS = 256, 384, 160


def outlier_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Activations with a channel 30 times larger, as down_proj sees them, and a gradient."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, IN, generator=generator)
    x[:, 17] *= 30
    return x, torch.randn(TOKENS, OUT, generator=generator) * 1e-4


def linear_of(trainable: bool, options: RecipeOptions) -> tuple[nn.Linear, emulated.EmulatedLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT)
    nn.init.normal_(linear.weight, std=0.02)
    plain = nn.Linear(IN, OUT)
    plain.load_state_dict(linear.state_dict())
    layer = LayerPlan(
        name="layer",
        in_features=IN,
        out_features=OUT,
        bias=True,
        precision=options.recipe,
        reason="test",
        lora=not trainable,
        trainable=trainable,
    )
    return plain, emulated.convert(linear, layer, options)


def run(module: nn.Module, options: RecipeOptions) -> tuple[torch.Tensor, torch.Tensor]:
    x, dy = outlier_inputs()
    x.requires_grad_()
    with emulated.context(options):
        y = module(x)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_equals_dequantize_then_matmul(recipe: str, trainable: bool, fp8_format: str) -> None:
    options = RecipeOptions(recipe=recipe, fp8_format=fp8_format)
    plain, module = linear_of(trainable, options)
    y, dx = run(module, options)
    x, dy = outlier_inputs()
    weight = plain.weight.detach()
    held = quantize_weight(weight, options).dequantize()
    assert torch.equal(module.dequantize(), held)
    seen = quantize_rows(x, options).dequantize()
    assert torch.equal(y, functional.linear(seen, held) + plain.bias)
    gradient = quantize_rows(dy, options, gradient=True).dequantize()
    # MXFP8 blocks run along the summed dimension: a trained weight is blocked anew for dgrad.
    anew = recipe == "mxfp8" and trainable
    for_dgrad = quantize_rows(weight.t(), options).dequantize().t() if anew else held
    assert torch.equal(dx, gradient @ for_dgrad)
    if trainable:
        along_tokens = quantize_rows(dy.t(), options, gradient=True).dequantize()
        inputs = quantize_rows(x.t(), options).dequantize()
        assert torch.equal(module.weight.grad, along_tokens @ inputs.t())
        assert torch.equal(module.bias.grad, dy.sum(0))


# Output and gradients in dB. e4m3 has 3 mantissa bits, ~31 dB a tensor and ~28 dB a product;
# e5m2 has 2, ~25 dB a tensor: "hybrid" costs the gradients 4-5 dB.
@pytest.mark.parametrize(("fp8_format", "floor"), [("e4m3", 26.0), ("hybrid", 21.0)])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_sqnr_against_float64(recipe: str, fp8_format: str, floor: float) -> None:
    options = RecipeOptions(recipe=recipe, fp8_format=fp8_format)
    plain, module = linear_of(True, options)
    y, dx = run(module, options)
    x, dy = outlier_inputs()
    weight = plain.weight.detach().double()
    exact = x.double() @ weight.t() + plain.bias.detach().double()
    assert sqnr_db(exact, y) > 26
    assert sqnr_db(dy.double() @ weight, dx) > floor
    assert sqnr_db(dy.double().t() @ x.double(), module.weight.grad) > floor


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_backward_override(recipe: str) -> None:
    x, dy = outlier_inputs()
    options = RecipeOptions(recipe=recipe, backward_override="high_precision")
    plain, module = linear_of(True, options)
    _, dx = run(module, options)
    torch.testing.assert_close(dx, dy @ plain.weight.detach())
    torch.testing.assert_close(module.weight.grad, dy.t() @ x)
    options = RecipeOptions(recipe=recipe, backward_override="dequantized")
    _, module = linear_of(True, options)
    _, dx = run(module, options)
    torch.testing.assert_close(dx, dy @ module.dequantize())
    torch.testing.assert_close(module.weight.grad, dy.t() @ quantize_rows(x, options).dequantize())


def test_delayed_scaling_looks_back_over_its_history() -> None:
    options = RecipeOptions(recipe="fp8_delayed", amax_history_len=2)
    _, module = linear_of(False, options)
    held = module.dequantize()
    used = []
    for size in (1.0, 8.0, 2.0, 1.0, 1.0):
        x = torch.full((16, IN), size).requires_grad_()
        with emulated.context(options):
            y = module(x)
        scaled = quantize_rows(x, options, amax=module.x_history.used).dequantize()
        assert torch.equal(y, functional.linear(scaled, held) + module.bias)
        used.append(None if module.x_history.used is None else module.x_history.used.item())
    # The first step has no past; 8 arrives clipped to 1 and is remembered for two steps.
    assert used == [None, 1.0, 8.0, 8.0, 2.0]


def test_most_recent_looks_one_step_back() -> None:
    options = RecipeOptions(
        recipe="fp8_delayed", amax_history_len=8, amax_compute_algo="most_recent"
    )
    _, module = linear_of(False, options)
    used = []
    for size in (1.0, 8.0, 2.0):
        with emulated.context(options):
            module(torch.full((16, IN), size))
        used.append(None if module.x_history.used is None else module.x_history.used.item())
    assert used == [None, 1.0, 8.0]


def test_evaluation_leaves_no_trace_in_the_history() -> None:
    options = RecipeOptions(recipe="fp8_delayed")
    _, module = linear_of(False, options)
    with emulated.context(options):
        module(torch.ones(16, IN))
    with torch.no_grad(), emulated.context(options):
        module(torch.full((16, IN), 100.0))
    with emulated.context(options):
        module(torch.ones(16, IN))
    assert module.x_history.used == 1.0

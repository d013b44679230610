"""Conformance: whatever file lies in precision/ and offers `convert` keeps these promises."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.plan import FP8_RECIPES, LayerPlan, RecipeOptions
from swiftfp8.precision._backend import PrecisionLinear, find_backend, load_backends
from swiftfp8.precision.recipes import sqnr_db

BACKENDS = load_backends()
CASES = [(name, recipe) for name, module in BACKENDS.items() for recipe in sorted(module.RECIPES)]


def usable(name: str, recipe: str) -> str:
    """The device to run on; skips, saying why, where the backend has none here."""
    reason = BACKENDS[name].available()
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    if torch.cuda.is_available():
        if recipe == "mxfp8" and torch.cuda.get_device_capability() < (10, 0):
            pytest.skip("MXFP8 needs compute capability 10.0")
        return "cuda"
    return "cpu"


def layer_plan(linear: nn.Linear, recipe: str, *, trainable: bool) -> LayerPlan:
    return LayerPlan(
        name="layer",
        in_features=linear.in_features,
        out_features=linear.out_features,
        bias=linear.bias is not None,
        precision=recipe,
        reason="test",
        lora=not trainable,
        trainable=trainable,
    )


def converted(name: str, recipe: str, *, trainable: bool):
    device = usable(name, recipe)
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, dtype=torch.bfloat16, device=device)
    reference = nn.Linear(256, 128, dtype=torch.float64, device=device)
    reference.load_state_dict(linear.state_dict())
    options = RecipeOptions(recipe=recipe)
    layer = layer_plan(linear, recipe, trainable=trainable)
    module = BACKENDS[name].convert(linear, layer, options)
    return module, reference, options, device


def test_the_expected_backends_are_found() -> None:
    assert {"te", "emulated", "high"} <= set(BACKENDS)
    assert find_backend(None) is BACKENDS["high"]
    with pytest.raises(SwiftFP8Error, match="emulatd"):
        find_backend("emulatd")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_offers_the_whole_interface(name: str) -> None:
    module = BACKENDS[name]
    assert name == module.NAME
    assert set(module.RECIPES) <= set(FP8_RECIPES)
    reason = module.available()
    assert reason is None or (isinstance(reason, str) and reason.strip())
    for function in ("token_multiple", "convert", "context", "checkpoint"):
        assert callable(getattr(module, function))
    assert list(inspect.signature(module.convert).parameters) == ["linear", "layer", "recipe"]
    for recipe in module.RECIPES:
        assert module.token_multiple(RecipeOptions(recipe=recipe)) >= 1


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_forward_and_gradients_against_float64(name: str, recipe: str, trainable: bool) -> None:
    # e4m3 alone gives ~31 dB a tensor and ~28 dB a product; e5m2 gradients ~22 dB.
    module, reference, options, device = converted(name, recipe, trainable=trainable)
    x = torch.randn(3, 37, 256, device=device).bfloat16().requires_grad_()
    dy = torch.randn(3, 37, 128, device=device).bfloat16()
    with BACKENDS[name].context(options):
        y = module(x)
    y.backward(dy)
    exact_x = x.detach().double().requires_grad_()
    exact = reference(exact_x)
    exact.backward(dy.double())
    assert y.shape == exact.shape and y.dtype == torch.bfloat16
    assert sqnr_db(exact, y) > 25
    assert sqnr_db(exact_x.grad, x.grad) > 20
    if trainable:
        assert sqnr_db(reference.weight.grad, module.weight.grad) > 20
        assert sqnr_db(reference.bias.grad, module.bias.grad) > 35
    else:
        assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_counts_what_ran_and_switches_off(name: str, recipe: str) -> None:
    module, reference, options, device = converted(name, recipe, trainable=False)
    x = torch.randn(16, 256, device=device).bfloat16().requires_grad_()
    with BACKENDS[name].context(options):
        module(x)
    assert (module.ran_fp8, module.ran_high) == (1, 0)
    module.enabled = False
    with BACKENDS[name].context(options):
        y = module(x)
    y.sum().backward()
    assert (module.ran_fp8, module.ran_high) == (1, 1)
    # Only the held weight is in FP8 now: the noise falls to one quantization, ~31 dB.
    assert sqnr_db(reference(x.double()), y) > 29
    assert sqnr_db(reference.weight.sum(0).expand_as(x), x.grad) > 20


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_frozen_weight_takes_one_byte_a_parameter(name: str, recipe: str) -> None:
    module, reference, options, device = converted(name, recipe, trainable=False)
    x = torch.randn(32, 256, device=device).bfloat16().requires_grad_()
    with BACKENDS[name].context(options):
        module(x).sum().backward()
    copies = 2 if (name, recipe) == ("te", "mxfp8") else 1
    scales = 1 / 32 * 4 if recipe == "mxfp8" else 0.05
    assert module.weight_bytes() <= copies * (1 + scales) * 256 * 128
    assert sqnr_db(reference.weight, module.dequantize()) > 29


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_rows_do_not_depend_on_padding(name: str, recipe: str) -> None:
    # 7 tokens are padded inside; the rows' own numbers must not change.
    module, _, options, device = converted(name, recipe, trainable=False)
    x = torch.randn(128, 256, device=device).bfloat16()
    x[3] *= 4  # the tensor's amax lies in the part that both see
    with torch.no_grad(), BACKENDS[name].context(options):
        whole = module(x)
    with torch.no_grad(), BACKENDS[name].context(options):
        part = module(x[:7])
    # Kernels of other tile sizes may sum in another order: BF16 rounding, no more.
    torch.testing.assert_close(part, whole[:7], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_checkpointing_gives_the_same_gradient(name: str, recipe: str) -> None:
    grads = []
    for recompute in (False, True):
        module, _, options, device = converted(name, recipe, trainable=True)
        x = torch.linspace(-1, 1, 32 * 256, device=device).view(32, 256).bfloat16()
        x.requires_grad_()
        run = BACKENDS[name].checkpoint(options)
        for _ in range(2):
            x.grad = module.weight.grad = None
            with BACKENDS[name].context(options):
                y = run(lambda t, m=module: torch.tanh(m(t)), x) if recompute else module(x).tanh()
            y.float().square().sum().backward()
        grads.append((x.grad, module.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize("name", BACKENDS)
def test_converted_linears_know_their_names_on_disk(name: str) -> None:
    recipe = min(BACKENDS[name].RECIPES, default=None)
    if recipe is None:
        linear = nn.Linear(8, 8)
        assert BACKENDS[name].convert(linear, None, None) is linear
        return
    module, *_ = converted(name, "fp8_current", trainable=True)
    assert isinstance(module, PrecisionLinear)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert [key for key, _ in module.named_parameters()] == ["weight", "bias"]


def test_a_backends_linear_must_say_what_it_holds() -> None:
    class Forgetful(PrecisionLinear):
        def dequantize(self) -> torch.Tensor:
            return torch.zeros(8, 8)

    with pytest.raises(TypeError, match="weight_bytes"):
        Forgetful(8, 8)

"""One Transformer Engine linear, as this package uses it: exactness, memory, odd token counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swiftfp8.plan import LayerPlan, RecipeOptions
from swiftfp8.precision import emulated, te
from swiftfp8.precision.recipes import sqnr_db

RECIPES = ("fp8_current", "fp8_delayed", "fp8_block")
OUT, IN = 4864, 896  # Qwen2.5-0.5B's up_proj


def layer_of(recipe: RecipeOptions, *, trainable: bool) -> LayerPlan:
    return LayerPlan(
        name="layer",
        in_features=IN,
        out_features=OUT,
        bias=True,
        precision=recipe.recipe,
        reason="test",
        lora=not trainable,
        trainable=trainable,
    )


def linears(recipe: RecipeOptions, *, trainable: bool, backend=te):
    """The converted layer, and the same weights in float64."""
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT, dtype=torch.bfloat16, device="cuda")
    nn.init.normal_(linear.weight, std=0.02)
    exact = nn.Linear(IN, OUT, dtype=torch.float64, device="cuda")
    exact.load_state_dict(linear.state_dict())
    return backend.convert(linear, layer_of(recipe, trainable=trainable), recipe), exact


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations with a channel 30 times larger, and a gradient as small as they are."""
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randn(tokens, IN, generator=generator, device="cuda")
    x[:, 17] *= 30
    dy = torch.randn(tokens, OUT, generator=generator, device="cuda") * 1e-5
    return x.bfloat16().requires_grad_(), dy.bfloat16()


def run(module, recipe: RecipeOptions, tokens: int = 512, backend=te):
    x, dy = inputs(tokens)
    with backend.context(recipe):
        y = module(x)
    y.backward(dy)
    return x, dy, y


@pytest.mark.parametrize("tokens", [512, 7, 200])
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_sqnr_against_float64_from_the_first_step(name: str, trainable: bool, tokens: int) -> None:
    # The first step of delayed scaling too: its scales start from what they meet.
    recipe = RecipeOptions(recipe=name)
    module, exact = linears(recipe, trainable=trainable)
    x, dy, y = run(module, recipe, tokens)
    assert module.ran_fp8 == 1 and module.ran_high == 0
    assert y.shape == (tokens, OUT) and y.dtype == torch.bfloat16
    assert sqnr_db(exact(x.double()), y) > 25
    assert sqnr_db(dy.double() @ exact.weight, x.grad) > 20
    if trainable:
        assert sqnr_db(dy.double().t() @ x.double(), module.weight.grad) > 20


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_the_emulated_backend_has_the_same_numerics(name: str, trainable: bool) -> None:
    # The same quantized operands; what is left is BF16's rounding of the result (~50 dB), and for
    # fast accumulation on Hopper (14 bits) a little more.
    recipe = RecipeOptions(recipe=name, split_accumulator=True)
    real, _ = linears(recipe, trainable=trainable)
    twin, _ = linears(recipe, trainable=trainable, backend=emulated)
    assert sqnr_db(real.dequantize(), twin.dequantize()) > 60
    x, _, y = run(real, recipe)
    twin_x, _, twin_y = run(twin, recipe, backend=emulated)
    assert sqnr_db(twin_y, y) > 40
    assert sqnr_db(twin_x.grad, x.grad) > 40
    if trainable:
        assert sqnr_db(twin.weight.grad, real.weight.grad) > 40


@pytest.mark.parametrize("name", RECIPES)
def test_a_frozen_weight_stays_one_copy_through_a_step(name: str) -> None:
    recipe = RecipeOptions(recipe=name)
    warm, _ = linears(recipe, trainable=False)
    run(warm, recipe)  # cuBLAS and Transformer Engine allocate their workspaces
    del warm, _
    before = torch.cuda.memory_allocated()
    module = linears(recipe, trainable=False)[0]
    bias = 2 * OUT
    limit = 1.01 * OUT * IN
    assert module.weight_bytes() <= limit
    assert torch.cuda.memory_allocated() - before <= limit + bias + 64 * 1024
    x = run(module, recipe)[0]
    assert module.weight_bytes() <= limit
    with torch.no_grad(), te.context(recipe):
        module(x)
    assert module.weight_bytes() <= limit
    assert set(module.state_dict()) == {"bias"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_seeded_delayed_scale_quantizes_as_current_scaling_does(name: str) -> None:
    module, exact = linears(RecipeOptions(recipe=name), trainable=False)
    # 31.5 dB is e4m3's 2.65% error; scale 1 would give 3-11%, 30 to 19 dB.
    assert sqnr_db(exact.weight, module.dequantize()) > 31


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_recomputes_the_same_numbers(name: str, trainable: bool) -> None:
    recipe = RecipeOptions(recipe=name)
    checkpoint = te.checkpoint(recipe)
    results = []
    for recompute in (False, True):
        module, _ = linears(recipe, trainable=trainable)
        for _ in range(3):
            x, dy = inputs(256)
            module.zero_grad()
            with te.context(recipe):
                body = lambda t, m=module: torch.tanh(m(t))  # noqa: E731
                y = checkpoint(body, x) if recompute else body(x)
            y.backward(dy)
        results.append([x.grad, module.weight.grad] if trainable else [x.grad])
        if not trainable:
            assert module.weight_bytes() <= 1.01 * OUT * IN
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("trainable", [False, True])
def test_switched_off_it_runs_high_and_says_so(trainable: bool) -> None:
    recipe = RecipeOptions(recipe="fp8_current")
    module, exact = linears(recipe, trainable=trainable)
    module.enabled = False
    x, dy, y = run(module, recipe)
    assert (module.ran_fp8, module.ran_high) == (0, 1)
    # Trained: BF16 through and through. Frozen: the weight alone is FP8.
    assert sqnr_db(exact(x.double()), y) > (45 if trainable else 30)
    assert sqnr_db(dy.double() @ exact.weight, x.grad) > (45 if trainable else 30)
    module.enabled = True
    module(x.detach())  # outside of any context FP8 is off, and is not counted as on
    assert (module.ran_fp8, module.ran_high) == (0, 2)


def test_delayed_scaling_resumes_exactly() -> None:
    recipe = RecipeOptions(recipe="fp8_delayed", amax_history_len=4)
    module, _ = linears(recipe, trainable=True)
    for tokens in (64, 128, 192):
        run(module, recipe, tokens)
    saved = module.scaling_state()
    assert set(saved) == {"scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"}
    module.zero_grad()
    x, _, y = run(module, recipe)
    other, _ = linears(recipe, trainable=True)
    other.load_scaling_state(saved)
    other_x, _, other_y = run(other, recipe)
    assert torch.equal(y, other_y) and torch.equal(x.grad, other_x.grad)
    assert torch.equal(module.weight.grad, other.weight.grad)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(name: str, override: str) -> None:
    recipe = RecipeOptions(recipe=name, backward_override=override)
    module, _ = linears(recipe, trainable=False)
    x, dy, _ = run(module, recipe)
    # A frozen weight has no high-precision original: both are BF16 products of the FP8 weight.
    assert sqnr_db(dy.double() @ module.dequantize().double(), x.grad) > 45


def test_autocast_takes_float32_inputs_down() -> None:
    recipe = RecipeOptions(recipe="fp8_current")
    module, exact = linears(recipe, trainable=False)
    x, _ = inputs(64)
    with torch.autocast("cuda", torch.bfloat16), te.context(recipe):
        y = module(x.float())
    assert y.dtype == torch.bfloat16
    assert sqnr_db(exact(x.double()), y) > 25

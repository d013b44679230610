"""The fused decoder layer and the torch backend's linears against autograd and float64.

On a CPU the engine runs on its references. Two questions are kept apart: is the hand-written
backward pass right (answered with the FP8 cast replaced by no rounding at all, where it must agree
with autograd to float32's accuracy), and how much does FP8 cost (answered in decibels against
float64, on inputs with outliers).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
)

from swiftfp8.adapters.lora import add_adapter
from swiftfp8.plan import LayerPlan, LoraPlan, RecipeOptions
from swiftfp8.precision import torch_native
from swiftfp8.precision.kernels import install, quantize, swiglu, thin
from swiftfp8.precision.kernels.install import fuse_model

CONFIGS = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral-sliding": (MistralConfig, {"sliding_window": 8}),
}
SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FP8 storage replaced by float32: all that is left of a quantizer is a scale."""
    for module in (quantize, swiglu, thin, install, torch_native):
        monkeypatch.setattr(module, "E4M3", torch.float32)
    yield


def build(kind: type[PreTrainedConfig], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **more), attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1)
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.float()


def adapt(model: nn.Module, *, fp8: bool) -> PeftModel:
    """LoRA with random A and B on every linear of the layers, over FP8 or plain linears."""
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name != "lm_head"
    ]
    for name in names if fp8 else ():
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        plan = LayerPlan(
            name=name, in_features=linear.in_features, out_features=linear.out_features,
            bias=linear.bias is not None, precision="fp8_current", reason="", lora=True,
            trainable=False,
        )  # fmt: skip
        converted = torch_native.convert(linear, plan, RecipeOptions(recipe="fp8_current"))
        setattr(model.get_submodule(parent), child, converted)
    lora = LoraPlan(rank=4, alpha=8, dropout=0.0, use_rslora=False, targets=tuple(names))
    adapted = add_adapter(model, lora)
    torch.manual_seed(1)
    for name, parameter in sorted(adapted.named_parameters()):
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    return adapted.train()


def step(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 24))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    return loss.item(), gradients


def decibels(result: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    noise = (result.double() - expected).square().sum()
    return (10 * torch.log10(expected.square().sum() / noise)).item()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recompute", ["none", "cheap", "full"])
def test_backward_pass_is_autograds(unrounded: None, name: str, recompute: Any) -> None:
    kind, more = CONFIGS[name]
    reference = adapt(build(kind, **more), fp8=False)
    model = adapt(build(kind, **more), fp8=True)
    found = fuse_model(model, recompute=recompute)
    assert len(found) == 2 and set(found.values()) == {None}
    expected_loss, expected = step(reference)
    loss, gradients = step(model)
    assert loss == pytest.approx(expected_loss, abs=1e-4)
    # float32 sums in another order, through two layers: five digits are left.
    assert min(decibels(gradients[n], expected[n]) for n in expected) > 80


def test_checkpointing_and_keeping_bf16_change_nothing(unrounded: None) -> None:
    model = adapt(build(Qwen2Config), fp8=True)
    fuse_model(model, recompute="none", keep_gate_up_fp8=False)
    loss, gradients = step(model)
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_again, gradients_again = step(model)
    assert loss_again == loss
    assert all(torch.equal(gradients[n], gradients_again[n]) for n in gradients)


def test_unfused_calls_give_the_same_loss() -> None:
    model = adapt(build(Qwen2Config), fp8=True)
    before, _ = step(model)
    fuse_model(model)
    fused, _ = step(model)
    assert fused == pytest.approx(before, abs=2e-3)
    ids = torch.arange(8).view(1, 8)
    model.eval()
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        cached = model(input_ids=ids, use_cache=True).logits
        with model.disable_adapter():
            without = model(input_ids=ids, use_cache=False).logits
    # The unfused path rounds q, k, v, and LoRA's sum at other places.
    assert decibels(cached, plain) > 20
    assert decibels(without, plain) < 20


def test_another_adapter_or_scaling_is_not_served_by_the_fused_one() -> None:
    model = adapt(build(Qwen2Config), fp8=True).eval()
    fuse_model(model)
    ids = torch.arange(16).view(1, 16)
    layer = model.base_model.model.model.layers[0]
    with torch.no_grad():
        first = model(input_ids=ids, use_cache=False).logits
        model.add_adapter("other", model.peft_config["default"])
        model.set_adapter("other")  # its B is zero
        assert layer.fused.serving(torch.zeros(1), None) is None
        other = model(input_ids=ids, use_cache=False).logits
        with model.disable_adapter():
            without = model(input_ids=ids, use_cache=False).logits
        model.set_adapter("default")
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, first)
        layer.mlp.down_proj.set_scale("default", 0.5)
        assert layer.fused.serving(torch.zeros(1), None) is None
    assert decibels(other, without) > 20
    assert decibels(other, first) < 20


@pytest.mark.parametrize("name", CONFIGS)
def test_without_its_adapters_a_fused_layer_is_what_it_is_with_empty_ones(name: str) -> None:
    """A reference for preferences begins where the model begins, to the last bit."""
    kind, more = CONFIGS[name]
    model = adapt(build(kind, **more), fp8=True).eval()
    fuse_model(model)
    ids = torch.arange(40).view(2, 20)
    layer = model.base_model.model.model.layers[0]
    with torch.no_grad():
        adapted = model(input_ids=ids, use_cache=False).logits
        with model.disable_adapter():
            assert layer.fused.serving(torch.zeros(1), None) is layer.fused.bare
            without = model(input_ids=ids, use_cache=False).logits
        assert layer.fused.serving(torch.zeros(1), None) is layer.fused.weights
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            parameter.zero_()
        empty = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(without, empty)
    assert decibels(without, adapted) < 20
    with model.disable_adapter():  # a graph through it is asked for: linear by linear
        assert layer.fused.serving(torch.zeros(1), None) is None


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizers_step_is_seen(unrounded: None, fused: bool) -> None:
    """A fused AdamW changes parameters without advancing their version."""
    reference = adapt(build(LlamaConfig), fp8=False)
    model = adapt(build(LlamaConfig), fp8=True)
    fuse_model(model)
    losses = []
    for trained in (reference, model):
        parameters = [p for p in trained.parameters() if p.requires_grad]
        # Plain SGD would do; Adam's first step has every element's full size.
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)
        step(trained)
        optimizer.step()
        losses.append(step(trained)[0])
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    assert losses[0] < step(adapt(build(LlamaConfig), fp8=False))[0] - 0.05


def test_padding_is_masked_as_in_the_plain_model(unrounded: None) -> None:
    reference = adapt(build(LlamaConfig), fp8=False)
    model = adapt(build(LlamaConfig), fp8=True)
    fuse_model(model)
    ids = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    expected = reference(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert decibels(logits[mask.bool()], expected[mask.bool()]) > 80


def test_what_does_not_fit_is_left_alone_with_a_reason() -> None:
    plain = adapt(build(Qwen2Config), fp8=False)
    assert set(fuse_model(plain).values()) == {"not all of its linears are held in row-wise FP8"}
    trained = adapt(build(Qwen2Config), fp8=True)
    for layer in trained.get_base_model().model.layers:
        layer.input_layernorm.weight.requires_grad_(True)
    assert set(fuse_model(trained).values()) == {"its norms are trained"}


def test_a_merged_weight_is_held_once() -> None:
    model = adapt(build(Qwen2Config), fp8=True)
    layer = model.get_base_model().model.layers[0]
    before = layer.mlp.up_proj.base_layer.dequantize()
    fuse_model(model)
    up, gate = layer.mlp.up_proj.base_layer, layer.mlp.gate_proj.base_layer
    assert torch.equal(up.dequantize(), before)
    assert up.weight_bits.untyped_storage().data_ptr() == (
        gate.weight_bits.untyped_storage().data_ptr()
    )
    # One byte a weight, and four for each output channel.
    assert up.weight_bytes() == 64 * 160 + 4 * 160


def outliers(tokens: int, features: int, seed: int) -> torch.Tensor:
    """Activations as LLMs have them: a few channels 30 times, a few tokens 100 times larger."""
    x = torch.randn(tokens, features, generator=torch.Generator().manual_seed(seed))
    x[:, ::97] *= 30
    x[::50] *= 100
    return x


def test_linear_with_lora_against_float64() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 384)
    linear.weight.data.normal_(0, 0.02)
    x, dy = outliers(200, 256, 1), outliers(200, 384, 2)
    a, b = torch.randn(8, 256) * 0.06, torch.randn(384, 8) * 0.02
    exact = [t.double().requires_grad_() for t in (x, a, b)]
    weight, bias = linear.weight.detach().double(), linear.bias.detach().double()
    y_exact = exact[0] @ weight.t() + bias + 2 * exact[0] @ exact[1].t() @ exact[2].t()
    y_exact.backward(dy.double())
    ours = [t.clone().requires_grad_() for t in (x, a, b)]
    module = torch_native.RowwiseFrozenLinear(linear)
    y = module.forward_lora(*ours, 2.0, nn.Identity())
    y.backward(dy)
    assert decibels(y, y_exact) >= 25
    for mine, theirs in zip(ours, exact, strict=True):
        assert decibels(mine.grad, theirs.grad) >= 20
    assert module.ran_fp8 == 1


def test_trained_linear_against_float64() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 384)
    x, dy = outliers(200, 256, 1), outliers(200, 384, 2)
    exact = x.double().requires_grad_()
    weight = linear.weight.detach().double().requires_grad_()
    y_exact = exact @ weight.t() + linear.bias.detach().double()
    y_exact.backward(dy.double())
    module = torch_native.RowwiseTrainedLinear(linear)
    mine = x.clone().requires_grad_()
    y = module(mine)
    y.backward(dy)
    assert decibels(y, y_exact) >= 25
    assert decibels(mine.grad, exact.grad) >= 20
    assert decibels(module.weight.grad, weight.grad) >= 20


def trained_model(model: nn.Module) -> nn.Module:
    """The model with every linear but the head trained in FP8."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            plan = LayerPlan(
                name=name, in_features=module.in_features, out_features=module.out_features,
                bias=module.bias is not None, precision="fp8_current", reason="", lora=False,
                trainable=True,
            )  # fmt: skip
            parent, _, child = name.rpartition(".")
            converted = torch_native.convert(module, plan, RecipeOptions(recipe="fp8_current"))
            setattr(model.get_submodule(parent), child, converted)
    return model


def test_compiled_layers_train_as_plain_ones_and_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced and differentiated as for a GPU, but run by PyTorch's own operators."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = Qwen2Config(**SIZES | {"tie_word_embeddings": True})
    ids = torch.randint(0, 128, (2, 32))
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").bfloat16()
        trained_model(model)
        if compiled:
            assert torch_native.compile_layers(model, swiglu=True) == 2
        for _ in range(2):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        assert model.model.layers[1].mlp.down_proj.ran_fp8 == 2
        gradients = {name: p.grad.double() for name, p in model.named_parameters()}
        runs.append((loss.item(), gradients))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-3)
    for name, expected in runs[0][1].items():
        # Sums in another order move some values across an FP8 rounding boundary.
        assert decibels(runs[1][1][name], expected) > 20, name


def test_only_a_known_mlp_runs_as_one_function() -> None:
    """Seed-OSS drops out of its MLP's output: no attribute of the layer's linears shows that."""
    config = SeedOssConfig(**SIZES, residual_dropout=0.1)
    for known in (False, True):  # as the plan knows: see tests/unit/test_plan.py
        model = trained_model(AutoModelForCausalLM.from_config(config))
        torch_native.compile_layers(model, swiglu=known)
        assert ("forward" in vars(model.model.layers[0].mlp)) == known


def test_a_copy_of_a_compiled_model_answers_with_its_own_weights() -> None:
    model = trained_model(AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)))
    mlp = model.model.layers[0].mlp
    torch_native._fuse_swiglu(mlp)
    other = copy.deepcopy(mlp)
    nn.init.zeros_(other.down_proj.weight)
    x = torch.randn(4, 64)
    assert mlp(x).abs().max() > 0 and torch.equal(other(x), torch.zeros(4, 64))


def test_a_cast_leaves_scales_in_float32() -> None:
    model = trained_model(AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)))
    linear = model.to(torch.bfloat16).model.layers[0].mlp.up_proj
    assert linear.constants.least.dtype == linear.constants.ones.dtype == torch.float32
    frozen = torch_native.RowwiseFrozenLinear(nn.Linear(32, 32)).to(torch.bfloat16)
    assert frozen.group(None).scale_N.dtype == torch.float32


def test_a_zero_row_and_a_huge_one_stay_finite() -> None:
    x = torch.zeros(3, 64)
    x[1] = 3e38
    x8, scale = quantize.quantize_rows(x)
    back = quantize.dequantize_rows(x8, scale)
    assert torch.equal(back[0], x[0]) and torch.isfinite(back).all()
    assert torch.allclose(back[1], x[1], rtol=1e-6)

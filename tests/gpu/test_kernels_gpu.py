"""The torch backend on a GPU: kernels, numerics, memory, and no wait for the host in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from swiftfp8.adapters.lora import add_adapter
from swiftfp8.plan import LayerPlan, LoraPlan, RecipeOptions
from swiftfp8.precision import torch_native
from swiftfp8.precision.kernels import (
    cross_entropy,
    lora,
    quantize,
    rmsnorm,
    rope,
    swiglu,
    thin,
    trained,
    transpose,
)
from swiftfp8.train.losses import fuse_loss, linear_cross_entropy

pytestmark = pytest.mark.gpu
MODULES = (cross_entropy, lora, quantize, rmsnorm, rope, swiglu, thin, transpose)
BF16 = torch.bfloat16
# tokens, hidden, inner, query heads, key/value heads, head width, rank: Qwen2.5's 7B and 0.5B
SHAPES = [(1024, 3584, 18944, 28, 4, 128, 16), (1000, 896, 4864, 14, 2, 64, 8)]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    reason = torch_native.available()
    assert reason is None, reason
    torch.manual_seed(0)
    yield


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_contiguous() else value


def both(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The kernel's result and the reference's, each on a copy of the inputs."""
    ours = function(*[clone(a) for a in args], **kwargs)
    with ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "runs_triton", lambda x: False))
        return ours, function(*[clone(a) for a in args], **kwargs)


def edges(ends: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *ends[:-1]), ends, strict=True))


def assert_close(ours: Any, theirs: Any, tolerance: float = 5e-3) -> None:
    if isinstance(ours, thin.Thin8):
        ours, theirs = ours.dequantize(), theirs.dequantize()
    if isinstance(ours, swiglu.GateUp):
        ours, theirs = (ours.data_TI2, ours.scale_T2), (theirs.data_TI2, theirs.scale_T2)
    if isinstance(ours, tuple):
        for pair in zip(ours, theirs, strict=True):
            assert_close(*pair, tolerance)
    elif ours is not None:
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error.item() < tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_row_kernels(shape: tuple[int, ...]) -> None:
    tokens, hidden, inner, *_ = shape
    x, columns = randn(tokens, hidden), torch.rand(hidden, device="cuda")
    x[3] *= 100
    x[:, 5] *= 50
    assert_close(*both(quantize.quantize_rows, x))
    assert_close(*both(quantize.quantize_rows, x, columns))
    assert_close(*both(quantize.quantize_rows, randn(tokens, inner)))
    assert_close(*both(quantize.quantize_rows, x, None, x.abs().amax().float() / 4e4))
    assert_close(*both(transpose.transpose8, randn(inner, hidden).to(quantize.E4M3)))
    assert_close(*both(transpose.cast_transpose_op, x, torch.rand(tokens, device="cuda") * 100))
    assert_close(*both(swiglu.swiglu_rows_op, randn(tokens, 2 * inner)))
    weight = torch.rand(hidden, device="cuda").to(BF16) + 0.5
    assert_close(*both(rmsnorm.rmsnorm_quantize, x, weight, 1e-6))
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    args = (randn(tokens, hidden), x, rstd, weight, randn(tokens, hidden))
    assert_close(*both(rmsnorm.rmsnorm_backward, *args, columns))


@pytest.mark.parametrize("compiled", [False, True])
def test_trained_swiglu_against_float64(compiled: bool) -> None:
    tokens, hidden, inner = 2048, 1536, 8960
    x = randn(tokens, hidden)
    x[3] *= 30
    x[:, 7] *= 10
    weights = [
        randn(inner, hidden) * 0.02,
        randn(inner, hidden) * 0.02,
        randn(hidden, inner) * 0.02,
    ]
    weights[1][5] *= 20
    weights[0][9] = 0
    dy = randn(tokens, hidden) * torch.logspace(-9, -5, tokens, device="cuda")[:, None]

    def plain(x: torch.Tensor, gate: Any, up: Any, down: Any) -> torch.Tensor:
        return (nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    constants = tuple(map(trained.Constants.of, weights))

    def fused(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return trained.trained_swiglu(x, weights, constants)

    ours = torch.compile(fused) if compiled else fused
    results = []
    for function, dtype in ((ours, BF16), (plain, torch.float64)):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (x, *weights)]
        y = function(*leaves)
        y.backward(dy.to(dtype))
        results.append([y.detach(), *[leaf.grad for leaf in leaves]])
    for mine, exact in zip(*results, strict=True):
        assert decibels(mine, exact) >= 20


@pytest.mark.parametrize("keep_fp8", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape: tuple[int, ...], keep_fp8: bool) -> None:
    tokens, _, inner, *_, rank = shape
    adapter = (randn(tokens, 2 * rank), randn(2 * inner, rank) * 0.1)
    run = both(
        swiglu.swiglu_quantize, randn(tokens, 2 * inner) * 2, adapter, keep=True, keep_fp8=keep_fp8
    )
    assert_close(*run)
    _, sm, kept = run[1]
    scales = torch.rand(2 * inner, device="cuda")
    assert_close(*both(swiglu.swiglu_backward, randn(tokens, inner), kept, sm, scales))


@pytest.mark.parametrize("shape", SHAPES)
def test_lora_kernels(shape: tuple[int, ...]) -> None:
    tokens, hidden, inner, queries, keys, width, rank = shape
    x = randn(tokens, hidden)
    x[:, 0] *= 3e4  # so that most values are subnormal in e4m3
    x8, sx = quantize.quantize_rows_reference(x)
    a, z = randn(3 * rank, hidden) * 0.01, randn(tokens, 3 * rank)
    a8 = thin.split_reference(a.float(), (hidden,))
    assert_close(*both(thin.project_rows, x8, sx, a8, BF16))
    assert_close(*both(lora.gather_columns, x8, sx, z, transposed=True))
    assert_close(*both(lora.add_product_, randn(tokens, hidden), z, a.t()))
    heads = rope.Heads(query=queries, key_value=keys, width=width)
    for ends in ((hidden,), (inner, 2 * inner), heads.ends):
        columns, blocks = ends[-1], len(ends)
        g8, sg = quantize.quantize_rows_reference(randn(tokens, columns))
        b, z = randn(columns, rank) * 0.01, randn(tokens, blocks * rank)
        scale = torch.rand(columns, device="cuda") + 0.5
        parts = [part.float() for part in b.split([end - start for start, end in edges(ends)])]
        inverse = 2.0 ** torch.randint(-3, 4, (columns,), device="cuda")
        halves = [part.float() for part in a[: blocks * rank].split(rank)]
        ours, theirs = both(thin.pack_adapter, halves, parts, 2.0, inverse, BF16)
        for name in ("a_RK", "b_Nr", "a8", "b8"):
            assert_close(getattr(ours, name), getattr(theirs, name))
        assert_close(*both(thin.project_rows, g8, sg, theirs.b8, BF16))
        assert_close(*both(lora.gather_columns, g8, sg, z, ends, scale, 2.0))
        y, residual = randn(tokens, columns), randn(tokens, columns)
        assert_close(*both(lora.add_product_, y, z, b, ends, residual))


@pytest.mark.parametrize("shape", SHAPES)
def test_rope_and_loss(shape: tuple[int, ...]) -> None:
    tokens, _, _, queries, keys, width, rank = shape
    length = tokens // 2
    heads = rope.Heads(query=queries, key_value=keys, width=width)
    angles = torch.rand(length, width // 2, device="cuda") * 6
    cos, sin = (torch.cat([part, part], -1).to(BF16) for part in (angles.cos(), angles.sin()))
    merged = heads.ends[-1]
    adapter = (randn(tokens, 3 * rank), randn(merged, rank) * 0.1)
    qkv = randn(tokens, merged)
    assert_close(*both(rope.finish_qkv_, qkv, adapter, randn(merged), cos, sin, heads))
    dq = randn(2, length, queries, width).transpose(1, 2)
    dk, dv = randn(2, keys, length, width), randn(2, length, keys, width).transpose(1, 2)
    scale = torch.rand(merged, device="cuda")
    assert_close(*both(rope.quantize_qkv_gradient, dq, dk, dv, cos, sin, scale))
    labels = torch.randint(0, 32003, (tokens,), device="cuda")
    labels[5] = -100
    logits = randn(tokens, 32003) * 3
    assert_close(*both(cross_entropy.cross_entropy_, logits, labels, grad=True))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("tokens", [2048, 1003])
def test_linear_with_lora_against_float64(tokens: int, split: bool) -> None:
    linear = nn.Linear(3584, 4608, device="cuda", dtype=BF16)
    linear.weight.data.normal_(0, 0.02)
    x, dy = randn(tokens, 3584), randn(tokens, 4608)
    for part in (x, dy):
        part[:, ::97] *= 30
        part[::50] *= 100
    a, b = torch.randn(16, 3584, device="cuda") * 0.01, torch.randn(4608, 16, device="cuda") * 0.01
    exact = [t.double().requires_grad_() for t in (x, a, b)]
    y_exact = nn.functional.linear(exact[0], linear.weight.detach().double())
    y_exact = y_exact + linear.bias.detach().double() + 2 * exact[0] @ exact[1].t() @ exact[2].t()
    y_exact.backward(dy.double())
    ours = [t.clone().requires_grad_() for t in (x, a, b)]
    module = torch_native.RowwiseFrozenLinear(linear, split_accumulator=split)
    y = module.forward_lora(*ours, 2.0, nn.Identity())
    y.backward(dy)
    assert decibels(y, y_exact) >= 25
    for mine, theirs in zip(ours, exact, strict=True):
        assert decibels(mine.grad, theirs.grad) >= 20


def decibels(result: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    noise = (result.double() - expected).square().sum()
    return (10 * torch.log10(expected.square().sum() / noise)).item()


def small_model() -> nn.Module:
    """Two layers of Qwen2.5-0.5B's shape with the engine, LoRA's B drawn at random."""
    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=2, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=4096, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to("cuda", BF16)
    model.requires_grad_(False)
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name != "lm_head"
    ]
    for name in names:
        parent, _, child = name.rpartition(".")
        linear = model.get_submodule(name)
        plan = LayerPlan(
            name=name, in_features=linear.in_features, out_features=linear.out_features,
            bias=linear.bias is not None, precision="fp8_current", reason="", lora=True,
            trainable=False,
        )  # fmt: skip
        converted = torch_native.convert(linear, plan, RecipeOptions(recipe="fp8_current"))
        setattr(model.get_submodule(parent), child, converted)
    plan = LoraPlan(rank=16, alpha=32, dropout=0.0, use_rslora=False, targets=tuple(names))
    adapted = add_adapter(model, plan)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.01)
    return adapted.train()


def gradients(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", BF16):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def test_fused_layers_agree_with_single_linears() -> None:
    model = small_model()
    ids = torch.randint(0, 4096, (2, 512), device="cuda")
    expected = gradients(model, ids)
    assert set(torch_native.fuse_model(model).values()) == {None}
    assert fuse_loss(model) is None
    got = gradients(model, ids)
    # Both paths carry FP8's noise through two layers, each its own.
    assert min(decibels(got[n], expected[n]) for n in expected) > 15


def test_layers_and_loss_never_wait_for_the_device() -> None:
    """Beside Hugging Face's own loop, which looks at the positions on the host once a step."""
    model = small_model()
    torch_native.fuse_model(model)
    causal = model.get_base_model()
    x = torch.randn(2, 512, 896, device="cuda").to(BF16)
    rotary = causal.model.rotary_emb(x, torch.arange(512, device="cuda")[None])
    labels = torch.randint(0, 4096, (2, 512), device="cuda")

    def run() -> None:
        h = x
        for layer in causal.model.layers:
            h = layer(h, position_embeddings=rotary, attention_mask=None)
        linear_cross_entropy(h, causal.lm_head.weight, labels).backward()

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_steps(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Losses of an optimizer step on each batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    losses = []
    for ids in batches:
        with torch.autocast("cuda", BF16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_graphs_change_no_bit(recompute: Any) -> None:
    """Two shapes by turns, an evaluation between, and a shape that comes once."""
    shapes = [(2, 256), (2, 256), (2, 128), (2, 256), (1, 64), (2, 128), (2, 256), (2, 128)] * 2
    batches = [torch.randint(0, 4096, shape, device="cuda") for shape in shapes]
    ends = []
    for graphs in (False, True):
        torch.manual_seed(1)
        model = small_model()
        torch_native.fuse_model(model, recompute=recompute, graphs=graphs)
        fuse_loss(model)
        losses = train_steps(model, batches[:7])
        with torch.no_grad():
            losses.append(model(input_ids=batches[0], labels=batches[0], use_cache=False).loss)
        losses += train_steps(model, batches[7:])
        ends.append((torch.stack(losses), [p for p in model.parameters() if p.requires_grad]))
        pool = model.get_base_model().model.layers[0].fused.graphs
    assert pool is not None
    assert pool.pool.recorded == 2 * 2 * 2 and pool.pool.replayed > 20  # shapes, layers, ways
    assert torch.equal(ends[0][0], ends[1][0])
    for plain, graphed in zip(ends[0][1], ends[1][1], strict=True):
        assert torch.equal(plain, graphed)


def test_two_forward_passes_before_a_backward_pass_do_not_share_a_graph() -> None:
    model = small_model()
    first, second = (torch.randint(0, 4096, (2, 128), device="cuda") for _ in range(2))
    expected = [gradients(model, ids) for ids in (first, second)]
    torch_native.fuse_model(model, graphs=True)
    plain = [gradients(model, ids) for ids in (first, second)]
    for _ in range(2):
        gradients(model, first)
    model.zero_grad()
    with torch.autocast("cuda", BF16):
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (first, second)]
    sum(losses).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert decibels(parameter.grad, plain[0][name] + plain[1][name]) > 60
            assert decibels(parameter.grad, expected[0][name] + expected[1][name]) > 12


def test_training_lowers_the_loss_as_in_bf16() -> None:
    """Fused AdamW on one batch, the FP8 engine beside the same model's single linears."""
    ids = torch.randint(0, 4096, (2, 256), device="cuda")
    ends = []
    for fused in (False, True):
        torch.manual_seed(1)
        model = small_model()
        if fused:
            torch_native.fuse_model(model)
            fuse_loss(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        losses = []
        for _ in range(20):
            with torch.autocast("cuda", BF16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.3
        ends.append(losses[-1])
    assert abs(ends[1] - ends[0]) < 0.05 * ends[0]


def test_converted_layers_hold_one_byte_a_parameter() -> None:
    model = small_model()
    torch_native.fuse_model(model)
    torch.cuda.synchronize()
    linears = [m for m in model.modules() if isinstance(m, torch_native.RowwiseFrozenLinear)]
    parameters = sum(m.in_features * m.out_features for m in linears)
    storages = {m.weight_bits.untyped_storage() for m in linears}
    held = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    assert held == parameters
    assert sum(m.weight_bytes() for m in linears) <= 1.15 * parameters

"""FP32 masters of BF16 weights: exact bits, torch's own AdamW step, training that moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_kit import rule_batch, tiny_llama

from swiftfp8.train import masters, rounding
from swiftfp8.train.masters import MasterAdamW, join_master, split_master
from swiftfp8.train.rounding import store_rounded

INF_BITS = 0x7F800000
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def every_kind_of_float() -> torch.Tensor:
    """All 2^16 upper halves with lower halves at both ends of each rounding, and random floats."""
    upper = torch.arange(1 << 16) << 16
    corners = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    chosen = (upper[:, None] | corners).reshape(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 1 << 32, (100_000,), generator=generator)
    unsigned = torch.cat([chosen, drawn])
    return (unsigned - ((unsigned >> 31) << 32)).to(torch.int32).view(torch.float32)


def test_weight_and_remainder_make_the_master_bit_for_bit():
    """Denormal, negative, huge and infinite ones, and both zeros, with every BF16 beside them."""
    floats = every_kind_of_float()
    numbers = floats[~floats.isnan()]
    weight, remainder = split_master(numbers)
    assert weight.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    assert torch.equal(bits_of(join_master(weight, remainder)), bits_of(numbers))


def test_the_weight_is_the_nearest_bf16():
    floats = every_kind_of_float()
    numbers = floats[~floats.isnan()]
    weight, _ = split_master(numbers)
    tie = (bits_of(numbers) & 0xFFFF) == 0x8000
    cast = numbers.bfloat16()
    assert torch.equal(weight[~tie].view(torch.int16), cast[~tie].view(torch.int16))
    # A tie goes away from zero; torch's cast takes the even neighbour.
    assert torch.equal(weight[tie].view(torch.int16), ((bits_of(numbers) >> 16) + 1)[tie].short())


def test_nan_stays_nan():
    """0x7fffffff is what a GPU makes: plain rounding would carry it into -0.0."""
    floats = every_kind_of_float()
    nans = floats[floats.isnan()]
    assert 0x7FFFFFFF in bits_of(nans)
    weight, remainder = split_master(nans)
    assert weight.isnan().all() and join_master(weight, remainder).isnan().all()


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    """Shapes that share a batch, fill several, and end in the middle of a vector."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(7,), (64, 33), (3, 5, 17), (1,), (300, 41)]
    drawn = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    return [torch.nn.Parameter(tensor.bfloat16().to(dtype)) for tensor in drawn]


def give_gradients(groups: list[list[torch.nn.Parameter]], seed: int) -> None:
    """The same BF16 numbers for all, each in its parameter's dtype."""
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*groups, strict=True):
        drawn = torch.randn(same[0].shape, generator=generator).bfloat16()
        for parameter in same:
            parameter.grad = drawn.to(parameter.dtype)


@pytest.mark.parametrize("batch", [1 << 24, 1024])
@pytest.mark.parametrize("mode", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_steps_equal_torchs_on_fp32_copies(mode, batch, monkeypatch):
    """Bit for bit; the fused kernel may contract other products where a vector ends."""
    monkeypatch.setattr(masters, "BATCH", batch)
    ours, theirs = parameters(), parameters(torch.float32)
    optimizer = MasterAdamW(ours, **OPTIONS, **mode)
    reference = torch.optim.AdamW(theirs, **OPTIONS, **mode)
    for step in range(5):
        give_gradients([ours, theirs], step)
        optimizer.step()
        reference.step()
        for weight, exact in zip(ours, theirs, strict=True):
            master = optimizer.master(weight)
            state, expected = optimizer.state[weight], reference.state[exact]
            if "fused" in mode:
                # An ulp of the largest weights (0.125) a step.
                torch.testing.assert_close(master, exact.detach(), rtol=0, atol=(step + 1) * 2**-27)
            else:
                assert torch.equal(master, exact)
                assert torch.equal(state["exp_avg"], expected["exp_avg"])
                assert torch.equal(state["exp_avg_sq"], expected["exp_avg_sq"])
            assert state["step"] == expected["step"] == step + 1
            assert (weight - master).abs().max() <= master.abs().max() * 2**-8


def test_groups_keep_their_decay_and_rate_and_fp32_weights_are_stepped_too():
    ours = parameters()
    ours[1] = torch.nn.Parameter(ours[1].detach().float())
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]

    def groups(some):
        return [
            {"params": some[:2], "weight_decay": 0.5},
            {"params": some[2:], "weight_decay": 0.0, "lr": 1e-2},
        ]

    optimizer = MasterAdamW(groups(ours), lr=1e-3)
    reference = torch.optim.AdamW(groups(theirs), lr=1e-3)
    give_gradients([ours, theirs], 0)
    ours[3].grad = theirs[3].grad = None  # a weight that no gradient reached
    before = ours[3].detach().clone()
    optimizer.step()
    reference.step()
    for weight, exact in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.master(weight), exact)
    assert "remainder" not in optimizer.state[ours[1]]
    assert torch.equal(ours[3], before) and ours[3] not in optimizer.state


def test_fp16_weights_and_views_are_refused():
    with pytest.raises(ValueError, match="float16"):
        MasterAdamW([torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))])
    with pytest.raises(ValueError, match="not contiguous"):
        MasterAdamW([torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16).t())])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_loaded_state_goes_on_bit_for_bit(tmp_path, state_dtype, fused):
    first, second = parameters(), parameters()
    options = OPTIONS | {"state_dtype": state_dtype, "fused": fused}
    optimizer, other = MasterAdamW(first, **options), MasterAdamW(second, **options)
    for step in range(3):
        give_gradients([first], step)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with torch.no_grad():
        for weight, saved in zip(second, first, strict=True):
            weight.copy_(saved)
    other.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert other.lacked_masters == 0
    for step in range(3, 6):
        give_gradients([first, second], step)
        optimizer.step()
        other.step()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and torch.equal(optimizer.master(a), other.master(b))
        for key, value in optimizer.state[a].items():
            assert value.dtype == other.state[b][key].dtype
            assert torch.equal(value, other.state[b][key])


def test_a_state_without_masters_starts_them_at_the_weights():
    """Plain AdamW's own, and one in which it has turned remainders into BF16."""
    plain, ours = parameters(), parameters()
    adamw = torch.optim.AdamW(plain, **OPTIONS)
    give_gradients([plain, ours], 0)
    adamw.step()
    for spoilt in (False, True):
        state = copy.deepcopy(adamw.state_dict())
        if spoilt:
            for values in state["state"].values():
                values["remainder"] = torch.ones_like(values["exp_avg"])
        optimizer = MasterAdamW(ours, **OPTIONS)
        optimizer.load_state_dict(state)
        assert optimizer.lacked_masters == len(ours)
        for weight in ours:
            assert torch.equal(optimizer.master(weight), weight.detach().float())
            assert optimizer.state[weight]["exp_avg"].dtype == torch.float32
        optimizer.step()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "remainder"])
def test_a_state_of_another_shape_is_refused(key):
    """A kernel writes through addresses, and must not write beyond an end."""
    ours = parameters()
    optimizer = MasterAdamW(ours, **OPTIONS)
    give_gradients([ours], 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1][key] = state["state"][1][key][:-1]
    with pytest.raises(ValueError, match=rf"{key} .* \(63, 33\), its weight is of \(64, 33\)"):
        optimizer.load_state_dict(state)


def test_bf16_moments_follow_fp32s_in_the_mean_and_decay():
    """Constant gradients, then none. Rounded to nearest, the second moment would not decay."""
    size, beta1, beta2 = 1 << 14, 0.9, 0.999
    weights = [
        torch.nn.Parameter(torch.zeros(size, dtype=d)) for d in (torch.bfloat16, torch.float)
    ]
    optimizer = MasterAdamW(weights, lr=1e-4, betas=(beta1, beta2), state_dtype="bf16")
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.3)
    for _ in range(100):
        optimizer.step()
    for weight in weights:
        gradient, state = weight.grad[0].double().item(), optimizer.state[weight]
        expected = {
            "exp_avg": gradient * (1 - beta1**100),
            "exp_avg_sq": gradient**2 * (1 - beta2**100),
        }
        for key, value in expected.items():
            assert state[key].dtype == torch.bfloat16
            moments = state[key].double()
            standard_error = (moments.std() / size**0.5).item()
            assert 0 < standard_error < 1e-3 * value
            assert abs(moments.mean().item() - value) < 3.5 * standard_error
        weight.grad.zero_()
    before = [optimizer.state[weight]["exp_avg_sq"].double().mean() for weight in weights]
    for _ in range(300):
        optimizer.step()
    for weight, start in zip(weights, before, strict=True):
        left = (optimizer.state[weight]["exp_avg_sq"].double().mean() / start).item()
        assert left == pytest.approx(beta2**300, rel=2e-3)  # 0.741
    nearest = torch.full((8,), 0.01).bfloat16()
    assert torch.equal(nearest * beta2, nearest)  # what makes all this needed


def test_rounding_goes_up_as_often_as_it_should_and_keeps_nan():
    """For each share of a BF16 step that is cut off, whatever the sign."""
    shares = torch.tensor([0, 1, 0x100, 0x4000, 0x8000, 0xC000, 0xFFFF])
    bits = (0x3F800000 + shares).to(torch.int32)
    for sign in (1.0, -1.0):
        value = (bits.view(torch.float32) * sign).repeat_interleave(1 << 14)
        outs = [torch.empty(value.shape, dtype=torch.bfloat16) for _ in range(2)]
        store_rounded(((outs[0], value), (outs[1], value)), torch.tensor(7.0), 3, 11)
        for out in outs:
            up = (out.float().abs() > 1).float().view(len(shares), -1).mean(1)
            expected = shares / 65536
            error = (expected * (1 - expected) / (1 << 14)).sqrt()
            assert ((up - expected).abs() <= 4 * error).all()
        assert not torch.equal(*outs)
    hard = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    hard = hard.view(torch.float32)
    out = torch.empty(4, dtype=torch.bfloat16)
    store_rounded(((out, hard), (out.clone(), hard)), torch.tensor(1.0), 0, 0)
    assert out.isnan().tolist() == [True, True, False, False]
    assert out[2:].tolist() == [torch.inf, -torch.inf]


def test_noise_does_not_depend_on_how_a_step_is_cut(monkeypatch):
    """Nor is it that of another step, another parameter, or another element."""
    value = torch.full((3000,), 1.0 + 2**-8)

    def drawn(step: int, position: int, start: int = 0) -> torch.Tensor:
        outs = [torch.empty(3000 - start, dtype=torch.bfloat16) for _ in range(2)]
        first, second = ((out, value[start:]) for out in outs)
        store_rounded((first, second), torch.tensor(float(step)), position, start)
        return outs[0]

    whole = drawn(1, 0)
    assert torch.equal(drawn(1, 0, start=1234), whole[1234:])
    monkeypatch.setattr(rounding, "_CHUNK", 700)
    assert torch.equal(drawn(1, 0), whole)
    for other in (drawn(2, 0), drawn(1, 1), torch.cat([whole[1:], whole[:1]])):
        assert 0.45 < (other == whole).float().mean() < 0.55


def test_moments_of_either_kind_are_loaded_into_the_other():
    ours = parameters()
    exact = MasterAdamW(ours, **OPTIONS)
    give_gradients([ours], 0)
    exact.step()
    rounded = MasterAdamW(ours, **OPTIONS, state_dtype="bf16")
    rounded.load_state_dict(exact.state_dict())
    for weight in ours:
        before, after = exact.state[weight], rounded.state[weight]
        assert torch.equal(before["exp_avg"].bfloat16(), after["exp_avg"])
        assert torch.equal(before["exp_avg_sq"].bfloat16(), after["exp_avg_sq"])
        assert torch.equal(before["remainder"], after["remainder"]) and after["step"] == 1
    rounded.step()
    back = MasterAdamW(ours, **OPTIONS)
    back.load_state_dict(rounded.state_dict())
    for weight in ours:
        before, after = rounded.state[weight], back.state[weight]
        assert after["exp_avg"].dtype == after["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(before["exp_avg_sq"].float(), after["exp_avg_sq"]) and after["step"] == 2
    back.step()
    with pytest.raises(ValueError, match="fp32 or bf16, not fp8"):
        MasterAdamW(ours, state_dtype="fp8")


def learn(model: Any, optimizer: torch.optim.Optimizer, steps: int = 200) -> float:
    """Mean loss of the last 20 steps."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**rule_batch(seed=step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def test_a_small_rate_moves_nearly_every_weight_and_follows_fp32():
    """200 steps at 1e-5. Plain BF16 moves few weights and lags; masters end where FP32 ends."""
    torch.manual_seed(0)
    loss, moved = {}, {}
    for name, dtype, kind in (
        ("fp32", torch.float32, torch.optim.AdamW),
        ("masters", torch.bfloat16, MasterAdamW),
        ("bf16", torch.bfloat16, torch.optim.AdamW),
    ):
        model = tiny_llama(hidden=64).bfloat16().to(dtype)
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = kind(model.parameters(), lr=1e-5, weight_decay=0.0)
        loss[name] = learn(model, optimizer)
        changed = total = 0
        for n, p in model.named_parameters():
            if "embed_tokens" in n:  # most of its rows are never read
                continue
            now = optimizer.master(p) if kind is MasterAdamW else p.detach()
            changed += int((now != start[n].to(now.dtype)).sum())
            total += p.numel()
        moved[name] = changed / total
    # Measured: 1.000, 1.000 and 0.155; losses 5.3439, 5.3445 and 5.5395, from 5.55.
    assert moved["fp32"] > 0.99 and moved["masters"] > 0.99
    assert moved["bf16"] < 0.3
    # Forward and backward differ by BF16's rounding.
    assert loss["masters"] == pytest.approx(loss["fp32"], abs=0.005)
    assert loss["bf16"] > loss["fp32"] + 0.1

"""FP32 masters on a GPU: torch's step in one kernel, exact resume, NaN kept, no wait."""

from __future__ import annotations

import io
from typing import Any
from unittest import mock

import pytest
import torch

from swiftfp8.precision.kernels.adamw import adamw_step_
from swiftfp8.precision.kernels.adamw_many import Stepped, Tiles, adamw_steps_
from swiftfp8.train import masters
from swiftfp8.train.masters import MasterAdamW, join_master, split_master

pytestmark = pytest.mark.gpu


def test_bits_survive_and_a_gpus_nan_stays_one() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=generator).to(torch.int32)
    bits[:2] = torch.tensor([0x7FFFFFFF, -1])
    floats = bits.cuda().view(torch.float32)
    weight, remainder = split_master(floats)
    again, nan = join_master(weight, remainder), floats.isnan()
    assert weight[nan].isnan().all() and again[nan].isnan().all()
    assert torch.equal(again[~nan].view(torch.int32), floats[~nan].view(torch.int32))


@pytest.mark.parametrize("mode", [{}, {"foreach": False}, {"fused": True}], ids=str)
def test_steps_are_torchs_on_fp32_copies_and_never_synchronize(mode: dict[str, bool]) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(s, generator=generator) * 0.02 for s in ((7,), (640, 331), (5000, 4001))]
    ours = [torch.nn.Parameter(tensor.bfloat16().cuda()) for tensor in drawn]
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    optimizer = MasterAdamW(ours, lr=1e-3, weight_decay=0.1, **mode)
    reference = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.1, **mode)
    for _ in range(3):
        for weight, exact in zip(ours, theirs, strict=True):
            weight.grad = torch.randn_like(weight)
            exact.grad = weight.grad.float()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reference.step()
    for weight, exact in zip(ours, theirs, strict=True):
        # Two ulps of the largest weights (below 0.125) a step: products are contracted otherwise.
        torch.testing.assert_close(
            optimizer.master(weight), exact.detach(), rtol=0, atol=3 * 2 * 2**-27
        )


def parameters(*sizes: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(size, generator=generator) * 0.02 for size in sizes]
    return [torch.nn.Parameter(tensor.bfloat16().cuda()) for tensor in drawn]


def ulp(x: torch.Tensor) -> torch.Tensor:
    """Distance of FP32 neighbours at x."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x.abs())[1] - 24)


def test_twenty_steps_of_the_kernel_are_torchs_on_fp32_copies() -> None:
    """Sizes of whole tiles, of whole vectors, and of neither."""
    ours = parameters(1 << 20, (1 << 16) + 16, 300_001)
    theirs = [torch.nn.Parameter(p.detach().float()) for p in ours]
    lr, steps = 1e-3, 20
    optimizer = MasterAdamW(ours, lr=lr, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=lr, weight_decay=0.1)
    generator = torch.Generator("cuda").manual_seed(3)
    for _ in range(steps):
        for weight, exact in zip(ours, theirs, strict=True):
            drawn = torch.randn(weight.shape, generator=generator, device="cuda")
            weight.grad = drawn.bfloat16()
            exact.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    for weight, exact in zip(ours, theirs, strict=True):
        master = optimizer.master(weight)
        state, expected = optimizer.state[weight], reference.state[exact]
        # Two ulps of the master, wherever it was on its way, and 2^-20 of each update (below 4 lr).
        largest = exact.detach().abs() + 4 * lr * steps
        bound = steps * (2 * ulp(largest) + 4 * lr * 2**-20)
        assert ((master - exact.detach()).abs() <= bound).all()
        # Half of a BF16 step, at most 2^-8 of the master: the weight is the master rounded.
        assert ((weight.detach() - master).abs() <= master.abs() * 2**-8).all()
        assert state["step"] == expected["step"] == steps
        # Gradients are below 8: their sums round by 2^-21 at most.
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=0, atol=1e-5)
        torch.testing.assert_close(
            state["exp_avg_sq"], expected["exp_avg_sq"], rtol=steps * 2**-22, atol=0
        )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_loaded_state_goes_on_bit_for_bit(state_dtype: Any, fused: bool) -> None:
    """Of large weights, which have the kernel, and of small ones, which torch steps."""
    sizes = (200_003, 1 << 17, 100, 4096)
    first, second = parameters(*sizes), parameters(*sizes)
    options = {"lr": 1e-3, "state_dtype": state_dtype, "fused": fused}
    optimizer, other = MasterAdamW(first, **options), MasterAdamW(second, **options)
    generator = torch.Generator("cuda").manual_seed(4)

    def give(*groups: list[torch.nn.Parameter]) -> None:
        for same in zip(*groups, strict=True):
            drawn = torch.randn(same[0].shape, generator=generator, device="cuda").bfloat16()
            for parameter in same:
                parameter.grad = drawn.clone()

    for _ in range(3):
        give(first)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for weight, saved in zip(second, first, strict=True):
            weight.copy_(saved)
    other.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    for _ in range(15):  # beyond step 16, a number that Triton would like to specialize for
        give(first, second)
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
            other.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[state_dtype]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert optimizer.state[a]["exp_avg"].dtype == dtype
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other.state[b][key]), key


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_one_launch_steps_all_as_a_launch_for_each_does(
    state_dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: of tiles, parts of one, sizes and views that need a launch of their own."""
    sizes = (1, 7, 896, 4096, 4097, 1 << 20, (1 << 20) + 16, 300_000)
    first, second = parameters(*sizes), parameters(*sizes)
    optimizer, other = (
        MasterAdamW(
            [{"params": some[:4]}, {"params": some[4:], "weight_decay": 0.0, "lr": 3e-3}],
            lr=1e-3,
            weight_decay=0.1,
            state_dtype=state_dtype,
        )
        for some in (first, second)
    )
    together = mock.Mock(side_effect=masters.adamw_steps_)
    monkeypatch.setattr(masters, "adamw_steps_", together)
    generator = torch.Generator("cuda").manual_seed(6)
    for step in range(20):
        for a, b in zip(first, second, strict=True):
            drawn = torch.randn(a.numel() + 3, generator=generator, device="cuda").bfloat16()
            a.grad, b.grad = drawn[:-3].clone(), drawn[:-3].clone()
            if a.numel() == 1 << 20 and step % 4 == 2:  # a view at an odd offset
                a.grad = b.grad = drawn[3:]
            if a.numel() == 896 and step == 1:
                a.grad = b.grad = None
        together.reset_mock()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
            stepped = [len(call.args[0]) for call in together.call_args_list]
            assert stepped == [1 if step == 1 else 2, 2 if step % 4 == 2 else 3]
            with monkeypatch.context() as patch:
                patch.setattr(Stepped, "aligned", False)
                other.step()
            assert together.call_count == 2
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other.state[b][key]), (key, a.shape)
    assert optimizer.state[first[2]]["step"] == 19 and optimizer.state[first[3]]["step"] == 20


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_one_launch_reads_fp32_gradients(moments: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(7)
    tensors = [torch.randn(50_000, generator=generator, device="cuda") for _ in range(2)]
    tensors[0] = tensors[0].bfloat16()
    tensors.insert(1, torch.zeros(50_000, dtype=torch.int16, device="cuda"))
    tensors += [torch.zeros(50_000, dtype=moments, device="cuda") for _ in range(2)]
    copies = tuple(tensor.clone() for tensor in tensors)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    adamw_step_(*tensors, step=3, position=5, **options)
    tiles = Tiles.of([4096, 50_000], torch.device("cuda"))
    adamw_steps_([Stepped.of(1, copies, step=3, position=5)], tiles, **options)
    for a, b in zip(tensors, copies, strict=True):
        assert torch.equal(a, b)


def test_bf16_moments_are_unbiased_and_decay() -> None:
    size, beta1, beta2 = 1 << 20, 0.9, 0.999
    [weight] = parameters(size)
    optimizer = MasterAdamW([weight], lr=1e-4, betas=(beta1, beta2), state_dtype="bf16")
    weight.grad = torch.full_like(weight, 0.3)
    gradient = weight.grad[0].double().item()
    for _ in range(100):
        optimizer.step()
    state = optimizer.state[weight]
    expected = {
        "exp_avg": gradient * (1 - beta1**100),
        "exp_avg_sq": gradient**2 * (1 - beta2**100),
    }
    for key, value in expected.items():
        moments = state[key].double()
        # FP32's own rounding of 100 sums may add a little.
        bound = 4 * moments.std().item() / size**0.5 + value * 2**-18
        assert abs(moments.mean().item() - value) < bound
    start = state["exp_avg_sq"].double().mean().item()
    weight.grad.zero_()
    for _ in range(500):
        optimizer.step()
    left = state["exp_avg_sq"].double().mean().item() / start
    assert left == pytest.approx(beta2**500, rel=1e-3)  # 0.606; to nearest it would stay at 1


def test_the_kernel_keeps_nan_and_reaches_beyond_2_to_the_31() -> None:
    """22 GB. Only the last two elements have gradients, so only they may move."""
    size = (1 << 31) + 5003
    weight = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    remainder = torch.zeros(size, dtype=torch.int16, device="cuda")
    gradient, average, square = (torch.zeros_like(weight) for _ in range(3))
    gradient[-1] = 1.0
    gradient[-2] = torch.nan
    adamw_step_(
        weight,
        remainder,
        gradient,
        average,
        square,
        step=1,
        position=0,
        lr=2.0**-12,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
    )
    assert weight[-2].isnan() and average[-2].isnan() and square[-2].isnan()
    moved = join_master(weight[-1:], remainder[-1:]).item()
    assert moved == pytest.approx(1 - 2.0**-12, abs=2**-22)
    assert average[-1].item() == pytest.approx(0.1, rel=2**-7)
    for start in range(0, size - 2, 1 << 28):
        part = slice(start, min(start + (1 << 28), size - 2))
        for tensor in (remainder, average, square):
            assert tensor[part].count_nonzero() == 0
        assert (weight[part] == 1).all()

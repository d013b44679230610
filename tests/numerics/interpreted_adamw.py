"""MasterAdamW's kernel against its PyTorch path, in Triton's interpreter; prints measurements.

A program of its own: see interpreted_kernels.py. Run by test_kernels_interpreted.py with
TRITON_INTERPRET=1.
"""

import copy
import json
from typing import Any
from unittest import mock

import interpreted
import torch

interpreted.mend()

from swiftfp8.precision.kernels import _triton  # noqa: E402
from swiftfp8.precision.kernels.adamw import adamw_step_  # noqa: E402
from swiftfp8.precision.kernels.adamw_many import Stepped, Tiles, adamw_steps_  # noqa: E402
from swiftfp8.train import masters  # noqa: E402
from swiftfp8.train.masters import MasterAdamW  # noqa: E402

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16 = torch.bfloat16
measured: dict[str, float] = {}
together = mock.Mock(side_effect=masters.adamw_steps_)


def without_kernel() -> Any:
    return mock.patch.object(_triton, "runs_triton", lambda x: False)


def weights(*sizes: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter((torch.randn(size) * 0.02).to(BF16)) for size in sizes]


def copied(
    parameters: list[torch.nn.Parameter], optimizer: MasterAdamW, **options: Any
) -> tuple[list[torch.nn.Parameter], MasterAdamW]:
    again = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    other = MasterAdamW(again, **OPTIONS, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return again, other


def give(*groups: list[torch.nn.Parameter]) -> None:
    """The same gradients for all."""
    for same in zip(*groups, strict=True):
        drawn = (torch.randn(same[0].shape) * 0.1).to(BF16)
        for parameter in same:
            parameter.grad = drawn.clone()


def ulp(x: torch.Tensor) -> torch.Tensor:
    """Distance of FP32 neighbours at x."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x.abs())[1] - 24)


def check_steps() -> None:
    """One step at a time from the same state: how far masters and moments are apart."""
    ours = weights(4096 * 2, 5000, 7)
    optimizer = MasterAdamW(ours, **OPTIONS)
    masters_off = moments_off = 0.0
    for _ in range(6):
        theirs, reference = copied(ours, optimizer)
        give(ours, theirs)
        before = [copy.deepcopy(optimizer.state[p]) for p in ours]
        optimizer.step()
        with without_kernel():
            reference.step()
        for a, b, old in zip(ours, theirs, before, strict=True):
            exact = reference.master(b)
            bound = 2 * ulp(exact) + OPTIONS["lr"] * 2.0**-20 * 4  # |m / sqrt(v)| < 4
            off = (optimizer.master(a) - exact).abs() / bound
            masters_off = max(masters_off, off.max().item())
            assert (a - optimizer.master(a)).abs().max() <= a.abs().max() * 2**-8
            mine, state = optimizer.state[a], reference.state[b]
            assert mine["step"] == state["step"]
            # Sums round by their terms, which may cancel.
            terms = torch.maximum(a.grad.float().abs(), old.get("exp_avg", a.float()).abs())
            off = (mine["exp_avg"] - state["exp_avg"]).abs() / ulp(terms)
            moments_off = max(moments_off, off.max().item())
            off = (mine["exp_avg_sq"] - state["exp_avg_sq"]).abs() / ulp(state["exp_avg_sq"])
            moments_off = max(moments_off, off.max().item())
    measured["masters, share of the bound"] = masters_off
    measured["moments, ulps"] = moments_off


def check_fp32_gradients() -> None:
    """FP32 gradients are read as they are: the same numbers make the same step."""
    for dtype in (torch.float32, BF16):
        results = []
        drawn = (torch.randn(9008) * 0.1).to(BF16)
        weight = torch.randn(9008).to(BF16)
        for gradient in (drawn, drawn.float(), drawn.float() * (1 + 2**-12)):
            tensors = [weight.clone(), torch.zeros(9008, dtype=torch.int16), gradient]
            tensors += [torch.zeros(9008, dtype=dtype) for _ in range(2)]
            copies = tuple(tensor.clone() for tensor in tensors)
            adamw_step_(*tensors, **OPTIONS, step=3, position=5)
            results.append([*tensors[:2], *tensors[3:]])
            tiles = Tiles.of([64, 9008, 0], torch.device("cpu"))
            adamw_steps_([Stepped.of(1, copies, step=3, position=5)], tiles, **OPTIONS)
            assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
        same, equal, other = results
        assert all(torch.equal(a, b) for a, b in zip(same, equal, strict=True))
        assert not torch.equal(same[2], other[2])


def check_many() -> None:
    """One launch for all that suit it makes every parameter's own step, bit for bit."""
    sizes = (1, 7, 896, 4096, 4097, 9008, 8192, 64)
    for state_dtype in ("fp32", "bf16"):
        ours = weights(*sizes)
        first = {"params": ours[:5]}, {"params": ours[5:], "weight_decay": 0.0, "lr": 3e-3}
        optimizer = MasterAdamW(first, **OPTIONS, state_dtype=state_dtype)
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        second = {"params": theirs[:5]}, {"params": theirs[5:], "weight_decay": 0.0, "lr": 3e-3}
        other = MasterAdamW(second, **OPTIONS, state_dtype=state_dtype)
        for step in range(4):
            give(ours, theirs)
            if step == 1:
                ours[2].grad = theirs[2].grad = ours[6].grad = theirs[6].grad = None
            if step == 2:  # a view that is not aligned, and one that is not contiguous
                for some in (ours, theirs):
                    some[3].grad = torch.cat([some[4].grad, some[0].grad])[1:4097]
                    some[5].grad = some[5].grad.repeat_interleave(2)[::2]
            together.reset_mock()
            optimizer.step()
            assert together.call_count == 2  # groups
            stepped = [one.row for call in together.call_args_list for one in call.args[0]]
            assert stepped == [[2, 3, 0, 1, 2], [3, 0, 2], [2, 0, 1, 2], [2, 3, 0, 1, 2]][step]
            with mock.patch.object(Stepped, "aligned", False):
                other.step()
            assert together.call_count == 2
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b)
                assert optimizer.state[a].keys() == other.state[b].keys()
                for key, value in optimizer.state[a].items():
                    assert torch.equal(value, other.state[b][key]), (step, key, a.shape)
        assert optimizer.state[ours[2]]["step"] == 3 and optimizer.state[ours[3]]["step"] == 4
        assert len(optimizer._tiles) == 2


def check_nan() -> None:
    [weight] = weights(5000)
    optimizer = MasterAdamW([weight], **OPTIONS, state_dtype="bf16")
    weight.grad = torch.zeros_like(weight)
    bad = torch.tensor([0x7FFF, -1], dtype=torch.int16).view(BF16)
    weight.grad[[3, 4999]] = bad
    weight.grad[5] = torch.inf
    optimizer.step()
    state = optimizer.state[weight]
    for tensor in (weight, optimizer.master(weight), state["exp_avg"], state["exp_avg_sq"]):
        assert tensor.isnan()[[3, 4999]].all() and tensor.isnan().sum() <= 3
    assert state["exp_avg_sq"][5] == torch.inf


def check_bf16_moments() -> None:
    """Constant gradients, then none: moments follow FP32's in the mean."""
    size, rounds = 4096, 40
    betas = (0.9, 0.999)
    ours = weights(size)
    optimizer = MasterAdamW(ours, lr=1e-4, betas=betas, state_dtype="bf16")
    ours[0].grad = torch.full_like(ours[0], 0.3)
    gradient = ours[0].grad[0].double().item()
    for _ in range(rounds):
        optimizer.step()
    state = optimizer.state[ours[0]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == BF16
    mean = gradient * (1 - betas[0] ** rounds)
    square = gradient**2 * (1 - betas[1] ** rounds)
    for key, expected in (("exp_avg", mean), ("exp_avg_sq", square)):
        values = state[key].double()
        error = values.std() / size**0.5
        measured[f"bias of {key}, standard errors"] = ((values.mean() - expected) / error).item()
    # The two moments of an element, and neighbours, must not share their noise.
    first, second = (
        state[k].double() - state[k].double().mean() for k in ("exp_avg", "exp_avg_sq")
    )
    for name, a, b in (("moments", first, second), ("neighbours", second[1:], second[:-1])):
        measured[f"correlation of {name}"] = ((a * b).mean() / a.std() / b.std()).item()
    start = state["exp_avg_sq"].double().mean()
    ours[0].grad = torch.zeros_like(ours[0])
    for _ in range(100):
        optimizer.step()
    left = state["exp_avg_sq"].double().mean() / start
    measured["decay"] = (left / betas[1] ** 100).item()


def check_resume() -> None:
    ours = weights(9000, 5000, 30)
    optimizer = MasterAdamW(ours, **OPTIONS, state_dtype="bf16")
    for _ in range(3):
        give(ours)
        optimizer.step()
    theirs, other = copied(ours, optimizer, state_dtype="bf16")
    for _ in range(3):
        give(ours, theirs)
        optimizer.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other.state[b][key]), key
    # Equal parameters at other places are rounded by other noise.
    twins = [torch.nn.Parameter(ours[0].detach().clone()) for _ in range(2)]
    optimizer = MasterAdamW(twins, **OPTIONS, state_dtype="bf16")
    twins[0].grad = twins[1].grad = torch.randn(9000).to(BF16)
    optimizer.step()
    first, second = (optimizer.state[twin] for twin in twins)
    assert not torch.equal(first["exp_avg"], second["exp_avg"])
    assert torch.equal(*twins)  # a step is made with what has not been rounded yet


def main() -> None:
    torch.manual_seed(0)
    launched = mock.Mock(side_effect=masters.adamw_step_)
    with (
        mock.patch.object(masters, "KERNEL_SIZE", 100),
        mock.patch.object(masters, "adamw_step_", launched),
        mock.patch.object(masters, "adamw_steps_", together),
    ):
        check_steps()
        assert launched.call_count == together.call_count == 6  # 5000 is not a multiple of 16
        check_fp32_gradients()
        check_nan()
        check_bf16_moments()
        check_resume()
    with mock.patch.object(masters, "adamw_steps_", together):
        check_many()
    print(json.dumps(measured))


if __name__ == "__main__":
    main()

"""FP32 masters on a GPU: torch's own step, NaN kept, no wait for the device."""

from __future__ import annotations

import pytest
import torch

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
        # An ulp of the largest weights (0.125) a step: kernels may contract other products.
        torch.testing.assert_close(
            optimizer.master(weight), exact.detach(), rtol=0, atol=3 * 2**-27
        )

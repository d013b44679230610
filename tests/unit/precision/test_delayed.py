from __future__ import annotations

from types import SimpleNamespace

import torch

from swiftfp8.plan import RecipeOptions
from swiftfp8.precision._delayed import DelayedScales


def test_a_restored_state_is_the_state_before_the_next_forward_pass_too():
    """An evaluation restores it, and a checkpoint may be written before training goes on."""
    meta = SimpleNamespace(scale=torch.ones(3), amax_history=torch.zeros(2, 3))
    linear = SimpleNamespace(
        fp8_meta={"scaling_fwd": meta}, init_fp8_metadata=lambda: None, weight=torch.ones(2)
    )
    scales = DelayedScales(RecipeOptions(recipe="fp8_delayed"))
    scales.before_forward(linear, torch.ones(2, 2))
    trained = scales.state(linear)
    meta.scale.fill_(9.0)  # an evaluation
    meta.amax_history.fill_(9.0)
    scales.pending = dict(trained)
    assert all(torch.equal(scales.state(linear)[name], trained[name]) for name in trained)
    scales.before_forward(linear, torch.ones(2, 2))
    assert torch.equal(meta.scale, trained["scale_fwd"])
    assert torch.equal(meta.amax_history, trained["amax_history_fwd"])

from __future__ import annotations

import torch
from model_kit import batch, tiny_llama

from swiftfp8.train.guard import find_fault


def test_a_spoilt_weight_is_named():
    model = tiny_llama(hidden=64)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    fault = find_fault(model, [batch()], lambda inputs: model(**inputs))
    assert fault.layer == "model.layers.1.mlp.up_proj"
    assert "parameter weight" in fault.detail


def test_an_overflow_is_told_from_a_bad_input():
    model = tiny_llama(hidden=64)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e6)
        model.model.layers[0].mlp.down_proj.weight.fill_(3e38)
    fault = find_fault(model, [batch()], lambda inputs: model(**inputs))
    assert fault.layer == "model.layers.0.mlp.down_proj"
    assert fault.detail == "its output is not finite though its input is"


def test_a_fault_of_the_backward_pass_is_found_by_the_gradients():
    model = tiny_llama(hidden=64)
    spoilt = model.model.layers[1].self_attn.o_proj
    spoilt.register_full_backward_hook(lambda *_: (torch.full((2, 32, 64), float("inf")),))
    model(**batch()).loss.backward()
    fault = find_fault(model, [batch()], lambda inputs: model(**inputs))
    # The hook spoils what o_proj hands back: of the modules before it, v_proj ran last.
    assert fault.layer == "model.layers.1.self_attn.v_proj"
    assert "gradient" in fault.detail


def test_nothing_found_is_said_and_hooks_are_gone():
    model = tiny_llama(hidden=64)
    fault = find_fault(model, [batch()], lambda inputs: model(**inputs))
    assert fault.layer is None
    assert all(not module._forward_hooks for module in model.modules())

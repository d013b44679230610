"""What transformers leaves in a model that it has dequantized."""

from __future__ import annotations

import pytest
import torch

from swiftfp8.export.reload import stop_rounding

pytest.importorskip("compressed_tensors")


def test_a_dequantized_model_rounds_no_longer_and_has_no_scales() -> None:
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    weight, x = model[0].weight.detach().clone(), torch.randn(4, 64)
    scheme = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}))
    model[0].weight_scale.data.fill_(0.01)
    with torch.no_grad():
        assert not torch.equal(model(x), x @ weight.T)  # as transformers 5.17 leaves it
        stop_rounding(model)
        assert torch.equal(model(x), torch.nn.functional.linear(x, weight))
    assert list(model.state_dict()) == ["0.weight"]

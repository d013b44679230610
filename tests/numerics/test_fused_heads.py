"""Fused decoder layers under other heads than a language model's give what unfused ones do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from model_kit import plan_for

from swiftfp8.fusion import FUSED_FAMILIES, FusionPlan
from swiftfp8.inject import inject_precision
from swiftfp8.plan import RecipeOptions
from swiftfp8.precision import torch_native
from swiftfp8.precision.kernels import install


@pytest.mark.parametrize("head", ["ForSequenceClassification", "Model"])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_other_heads(monkeypatch: pytest.MonkeyPatch, family: str, head: str) -> None:
    monkeypatch.setattr(torch_native, "available", lambda: None)
    calls = []
    run_layer = install.run_layer
    monkeypatch.setattr(install, "run_layer", lambda *a: (calls.append(a), run_layer(*a))[1])
    fused, plain = (outputs(family + head, fused=fused) for fused in (True, False))
    assert len(calls) == 2
    torch.testing.assert_close(fused, plain, rtol=1e-2, atol=1e-2)


def outputs(architecture: str, *, fused: bool) -> torch.Tensor:
    kind = getattr(transformers, architecture)
    config = kind.config_class(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = kind(config)
    plan = plan_for(
        model, recipe=RecipeOptions(recipe="fp8_current"), backend="torch", high=("score",)
    )
    targets = tuple(name for name in plan.lora.targets if name != "score")
    fusion = FusionPlan(layers=2 if fused else 0, total=2, reason=None)
    plan = replace(
        plan,
        fusion=fusion,
        lora=replace(plan.lora, targets=targets, task_type="FEATURE_EXTRACTION"),
    )
    model = inject_precision(model, plan, "cpu").eval()
    for name, parameter in sorted(model.named_parameters()):
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    assert fused == any(hasattr(module, "fused") for module in model.modules())
    ids = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        return model(input_ids=ids)[0]

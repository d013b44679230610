"""Which models have decoder layers that the torch backend fuses, told without weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from swiftfp8.fusion import FUSED_ARCHITECTURES
from swiftfp8.models.layer_form import why_layers_unfused


def on_meta(architecture: str, **options: Any) -> Any:
    kind = getattr(transformers, architecture)
    config = kind.config_class(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, vocab_size=64, pad_token_id=0, **options,
    )  # fmt: skip
    with torch.device("meta"):
        return kind(config)


@pytest.mark.parametrize("architecture", sorted(FUSED_ARCHITECTURES))
def test_the_fused_architectures_fit(architecture: str) -> None:
    assert why_layers_unfused(on_meta(architecture)) is None


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "o_proj has a bias"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "gate_proj has a bias"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "not SiLU"),
        ("LlamaForCausalLM", {"attention_dropout": 0.1}, "attention dropout"),
        ("GemmaForCausalLM", {}, "norms"),
        ("Gemma3ForCausalLM", {}, "norms"),
        ("Phi3ForCausalLM", {}, "no q_proj"),
        ("StableLmForCausalLM", {}, "no RMSNorms"),
    ],
)
def test_another_form_is_named(architecture: str, options: dict[str, Any], reason: str) -> None:
    assert reason in str(why_layers_unfused(on_meta(architecture, **options)))


def test_code_of_a_checkpoint_is_not_trusted_to_have_the_form() -> None:
    model = on_meta("LlamaForCausalLM")
    model.__class__ = type("LlamaForCausalLM", (type(model),), {"__module__": "remote"})
    assert why_layers_unfused(model) == "its code comes with the checkpoint"

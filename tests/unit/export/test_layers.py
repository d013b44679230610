"""Which linears become FP8, and the reason of each that does not."""

from pathlib import Path

import pytest
from export_kit import save_model

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import CheckpointReader, TensorSpec
from swiftfp8.export.layers import ModelLayers, decide, inspect_model


def reasons(directory: Path, **options: object) -> dict[str, str]:
    """Reason by name, "linear" for what is quantized."""
    layers = inspect_model(directory)
    specs = CheckpointReader(directory).specs
    decisions = decide(layers, specs, multiple=(128, 128), **options)
    for decision in decisions:
        assert decision.quantize == (decision.reason == "linear")
    return {decision.name: decision.reason for decision in decisions}


def test_all_but_the_head(tmp_path: Path) -> None:
    found = reasons(save_model(tmp_path))
    assert len(found) == 15
    assert {name for name, reason in found.items() if reason != "linear"} == {"lm_head"}
    assert found["lm_head"] == "output head"


def test_an_odd_member_keeps_its_fused_group_in_bf16(tmp_path: Path) -> None:
    """k and v of 1 x 64 rows: q fits, but engines fuse the three; o and the MLP stay FP8."""
    found = reasons(save_model(tmp_path, num_key_value_heads=1))
    prefix = "model.layers.0.self_attn."
    assert "64 is no multiple of 128" in found[prefix + "k_proj"]
    assert "64 is no multiple of 128" in found[prefix + "v_proj"]
    assert found[prefix + "q_proj"].startswith("fused with k_proj")
    assert found[prefix + "o_proj"] == "linear"
    assert found["model.layers.0.mlp.gate_proj"] == "linear"


@pytest.mark.parametrize("width", [448, 320])
def test_an_odd_width(tmp_path: Path, width: int) -> None:
    found = reasons(save_model(tmp_path, intermediate_size=width))
    kept = {name.rpartition(".")[2] for name, reason in found.items() if str(width) in reason}
    assert kept == {"gate_proj", "up_proj", "down_proj"}


def test_exclude_by_suffix_and_glob_takes_the_group(tmp_path: Path) -> None:
    found = reasons(save_model(tmp_path), exclude=["v_proj", "model.layers.1.mlp.down*"])
    assert found["model.layers.0.self_attn.v_proj"] == "export.exclude: v_proj"
    assert found["model.layers.0.self_attn.q_proj"].startswith("fused with v_proj")
    assert found["model.layers.1.mlp.down_proj"].startswith("export.exclude")
    assert found["model.layers.0.mlp.down_proj"] == "linear"


def test_exclude_that_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error) as caught:
        reasons(save_model(tmp_path), exclude=["donw_proj"])
    assert caught.value.fix == "did you mean down_proj?"


def test_routers_towers_and_experts() -> None:
    """By name and kind, without a model: experts are stored one by one, gates stay."""
    layers = ModelLayers(
        config={},
        linears={
            "model.layers.0.mlp.gate": "linear",
            "model.layers.0.mlp.shared.down_proj": "linear",
            "model.layers.0.router_like": "router",
            "vision_tower.fc1": "linear",
        },
        experts=("model.layers.0.mlp.experts",),
        keep_fp32=(),
        tied={},
    )
    names = [*layers.linears, "model.layers.0.mlp.experts.3.up_proj", "model.embed_tokens"]
    specs = {f"{name}.weight": spec(f"{name}.weight") for name in names}
    found = {d.name: d.reason for d in decide(layers, specs, multiple=(128, 128))}
    assert found == {
        "model.layers.0.mlp.gate": "router",
        "model.layers.0.mlp.shared.down_proj": "linear",
        "model.layers.0.router_like": "router",
        "vision_tower.fc1": "not part of the language model",
        "model.layers.0.mlp.experts.3.up_proj": "linear",
    }


def test_gates_of_a_mixture_are_listed_and_its_experts_quantized(tmp_path: Path) -> None:
    found = reasons(save_model(tmp_path, "qwen3_moe"))
    assert {name for name, reason in found.items() if reason == "router"} == {
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    }
    experts = {name: reason for name, reason in found.items() if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    assert set(experts.values()) == {"linear"}


def test_experts_in_one_tensor_stay_bf16_and_are_named() -> None:
    layers = ModelLayers(
        config={}, linears={}, experts=("model.layers.0.mlp.experts",), keep_fp32=(), tied={}
    )
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stacked = TensorSpec(name=name, dtype="BF16", shape=(4, 256, 256))
    (decision,) = decide(layers, {name: stacked}, multiple=(128, 128))
    assert (decision.name, decision.quantize) == ("model.layers.0.mlp.experts", False)
    assert "3D" in decision.reason


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="BF16", shape=(128, 256))


def test_a_quantized_base_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace("{", '{"quantization_config": {"quant_method": "gptq"},', 1)
    )
    with pytest.raises(SwiftFP8Error, match="quantized already"):
        inspect_model(tmp_path)

"""Scales for keys and values in FP8: measured where the model caches them, carried and checked."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_kit import save_model, save_tokenizer
from safetensors.torch import load_file, save_file
from test_export_formats import WITH_ROWS
from transformers import AutoModelForCausalLM

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate import calibration_text
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.source import open_source
from swiftfp8.export.verify import verify_directory

KV = ExportConfig(format="compressed_tensors", kv_cache="fp8", calibration_tokens=256)


def by_hand(base: Path) -> dict[str, float]:
    """The largest rotated key and value of every layer, from transformers' own rotary function."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    found = WITH_ROWS.calibration_rows()  # type: ignore[misc]
    windows = calibration_text(
        found.rows, 256, seed=found.seed, first_token=found.first_token
    ).windows_BT
    amax: dict[str, float] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        amax[name] = max(amax.get(name, 0.0), float(tensor.abs().max()))

    def watch(index: int) -> Any:
        def hook(module: Any, arguments: Any, keywords: Any) -> None:
            hidden = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
            shape = (*hidden.shape[:-1], -1, module.head_dim)
            key = module.k_proj(hidden).view(shape)
            key = (module.k_norm(key) if hasattr(module, "k_norm") else key).transpose(1, 2)
            cos, sin = keywords["position_embeddings"]
            name = f"model.layers.{index}.self_attn"
            note(f"{name}.k_scale", apply_rotary_pos_emb(key, key, cos, sin)[1])
            note(f"{name}.v_scale", module.v_proj(hidden))

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(watch(index), with_kwargs=True)
    with torch.inference_mode():
        for window in windows:
            model(input_ids=window[None], use_cache=False)
    return amax


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_scales_are_the_largest_rotated_key_and_value(tmp_path: Path, family: str) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers reads this format with it")
    base = save_tokenizer(save_model(tmp_path / "base", family))
    report = export_checkpoint(base, None, tmp_path / "export", KV, WITH_ROWS)
    assert report.reload and report.reload.bit_equal
    stored = load_file(str(tmp_path / "export" / "model.safetensors"))
    scales = {n: t for n, t in stored.items() if n.endswith((".k_scale", ".v_scale"))}
    expected = by_hand(base)
    assert scales.keys() == expected.keys() and len(scales) == 4
    for name, scale in scales.items():
        assert scale.dtype == torch.float32 and scale.shape == (1,)
        assert scale.item() * 448 == pytest.approx(expected[name], rel=1e-4)
    section = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert section["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    assert "4 scales" in dict(report.facts())["FP8 cache"]
    assert verify_directory(tmp_path / "export") == []
    # read as a base again, the scales are none of its weights
    assert not [name for name in open_source(tmp_path / "export").tensors if "k_scale" in name]


def test_the_library_understands_the_section(tmp_path: Path) -> None:
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="the library that defines the section"
    )
    base = save_tokenizer(save_model(tmp_path / "base"))
    settings = replace(KV, format="auto", verify=False)
    assert export_checkpoint(base, None, tmp_path / "export", settings, WITH_ROWS).quantized
    section = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(section).kv_cache_scheme
    assert (scheme.num_bits, scheme.strategy, scheme.dynamic) == (8, "tensor", False)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"format": "fp8_block"}, "fp8_block has no place for its scales"),
        ({"format": "bf16"}, "bf16 has no place for its scales"),
        ({"target": "transformers"}, "transformers has no cache in FP8"),
        ({"target": "tensorrt_llm"}, "tensorrt_llm takes scales of its cache from ModelOpt's"),
    ],
)
def test_what_can_not_carry_it_is_refused_before_writing(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    with pytest.raises(SwiftFP8Error) as error:
        export_checkpoint(base, None, tmp_path / "export", replace(KV, **changes), WITH_ROWS)
    assert why in error.value.what and error.value.where == "export.kv_cache"
    with pytest.raises(SwiftFP8Error, match="needs rows"):
        export_checkpoint(base, None, tmp_path / "export", KV)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_verify_names_faults_of_the_scales(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    export = tmp_path / "export"
    export_checkpoint(base, None, export, replace(KV, verify=False), WITH_ROWS)
    stored = load_file(str(export / "model.safetensors"))
    name = "model.layers.0.self_attn.k_scale"

    def fault(value: torch.Tensor | None) -> tuple[str, str]:
        changed = {key: tensor for key, tensor in stored.items() if key != name}
        changed |= {} if value is None else {name: value}
        save_file(changed, str(export / "model.safetensors"))
        (found,) = verify_directory(export)
        return found.where, found.what

    assert fault(None) == ("model.layers.0.self_attn", "has no k_scale")
    assert fault(torch.ones(1, dtype=torch.bfloat16)) == (name, "is BF16, not F32")
    assert fault(torch.ones(2)) == (name, "has shape (2,), not (1,)")
    for bad in (0.0, -1.0, math.nan, math.inf):
        assert fault(torch.tensor([bad])) == (name, "holds scales that are not positive")
    save_file(stored, str(export / "model.safetensors"))
    config = json.loads((export / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = None
    (export / "config.json").write_text(json.dumps(config))
    (found,) = verify_directory(export)
    assert found.severity == "warning" and "no kv_cache_scheme" in found.what
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "dynamic": True}
    (export / "config.json").write_text(json.dumps(config))
    (found,) = verify_directory(export)
    assert found.what == "kv_cache_scheme.dynamic is True"

"""Every format on tiny models: written, checked, and read by whoever can read it here."""

import json
from pathlib import Path

import pytest
import torch
from export_kit import save_model, save_tokenizer
from safetensors.torch import load_file
from test_export import save_adapter
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate_stage import CalibrationRows
from swiftfp8.export.export import ExportContext, export_checkpoint
from swiftfp8.export.verify import verify_directory

WITH_ROWS = ExportContext(
    calibration_rows=lambda: CalibrationRows(
        rows=[list(range(n, n + 40)) for n in range(10, 250, 8)], first_token=None, seed=0
    )
)


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_compressed_tensors_reloads_bit_equal(tmp_path: Path, family: str) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers reads this format with it")
    base = save_model(tmp_path / "base", family, intermediate_size=448)
    settings = ExportConfig(format="compressed_tensors")
    report = export_checkpoint(base, None, tmp_path / "export", settings)
    assert report.reload and report.reload.bit_equal
    section = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"
    gates = [f"model.layers.{n}.mlp.gate" for n in range(2)] if family == "qwen3_moe" else []
    assert section["ignore"] == ["lm_head", *gates]


def test_experts_are_one_by_one_in_the_file_and_reload(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3_moe")
    report = export_checkpoint(base, None, tmp_path / "export", ExportConfig(format="fp8_block"))
    assert report.reload and report.reload.bit_equal
    assert report.quantized == 2 * (4 + 4 * 3)
    stored = load_file(str(tmp_path / "export" / "model.safetensors"))
    assert all(tensor.dim() <= 2 for tensor in stored.values())
    expert = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert stored[expert].dtype == torch.float8_e4m3fn
    section = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert section["modules_to_not_convert"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    ]


def test_fp8_says_who_checked_it_and_who_reads_nonsense(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3")
    report = export_checkpoint(base, None, tmp_path / "export", ExportConfig(format="fp8"))
    assert report.reload is None
    assert report.read_back and report.read_back.tensors == 25
    assert "nonsense" in report.warnings[0] and "vllm" in report.warnings[0]
    facts = dict(report.facts())
    assert "not by transformers" in facts["reload"]


def test_modelopt_measures_its_input_scales(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3")
    save_tokenizer(base)
    settings = ExportConfig(format="modelopt", calibration_tokens=256)
    with pytest.raises(SwiftFP8Error, match="needs rows"):
        export_checkpoint(base, None, tmp_path / "export", settings)
    report = export_checkpoint(base, None, tmp_path / "export", settings, WITH_ROWS)
    assert report.read_back
    stored = load_file(str(tmp_path / "export" / "model.safetensors"))
    prefix = "model.layers.0.self_attn."
    scales = [stored[f"{prefix}{name}_proj.input_scale"] for name in "qkv"]
    assert scales[0] == scales[1] == scales[2]
    # RMSNorm with unit weights gives a root mean square of 1, so a largest magnitude of 2 to 6
    assert 2 / 448 < scales[0] < 6 / 448
    legacy = json.loads((tmp_path / "export" / "hf_quant_config.json").read_text())
    assert legacy["quantization"]["quant_algo"] == "FP8"
    assert legacy["quantization"]["exclude_modules"] == ["lm_head"]
    assert verify_directory(tmp_path / "export") == []
    (tmp_path / "export" / "hf_quant_config.json").unlink()
    assert "is missing" in verify_directory(tmp_path / "export")[0].what


def test_modelopt_of_a_mixture_is_refused_before_writing(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3_moe")
    save_tokenizer(base)
    settings = ExportConfig(format="modelopt", calibration_tokens=256)
    with pytest.raises(SwiftFP8Error, match="experts run as one module"):
        export_checkpoint(base, None, tmp_path / "export", settings, WITH_ROWS)
    assert not (tmp_path / "export").exists()


def test_an_adapter_is_copied_with_its_tokenizer(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3")
    save_tokenizer(base)
    adapter = save_adapter(tmp_path / "adapter", "qwen3")
    settings = ExportConfig(format="adapter")
    report = export_checkpoint(base, adapter, tmp_path / "export", settings)
    assert report.read_back and report.read_back.tensors == 28
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "config.json" not in names
    with pytest.raises(SwiftFP8Error, match="no adapter to export"):
        export_checkpoint(base, None, tmp_path / "other", settings)
    weights = tmp_path / "export" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "damaged" in verify_directory(tmp_path / "export")[0].what


def test_auto_takes_channels_for_a_model_of_odd_width(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama", hidden_size=320)
    report = export_checkpoint(base, None, tmp_path / "export", ExportConfig(verify=False))
    assert report.format == "compressed_tensors"
    assert report.quantized == 14
    assert "0% of the linear weights fit 128x128 blocks" in report.format_reason


def test_a_multimodal_model_keeps_its_vision_and_loads_under_both_names(tmp_path: Path) -> None:
    """Gemma 3's checkpoints name modules in another way than its class: both names are listed."""
    torch.manual_seed(0)
    text = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    text |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299
    )
    model = Gemma3ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    report = export_checkpoint(tmp_path / "base", None, tmp_path / "export", ExportConfig())
    assert report.reload and report.reload.bit_equal
    assert (report.format, report.quantized) == ("fp8_block", 7)
    stored = load_file(str(tmp_path / "export" / "model.safetensors"))
    fp8 = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert all(name.startswith("language_model.model.layers.0.") for name in fp8)
    section = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    listed = section["modules_to_not_convert"]
    kept = "vision_tower.encoder.layers.0.mlp.fc1"
    assert {kept, f"model.{kept}", "lm_head", "language_model.lm_head"} <= set(listed)
    assert verify_directory(tmp_path / "export")[0].where == "tokenizer"

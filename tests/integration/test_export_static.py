"""Static activation scales: measured, written where a format has them, refused elsewhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_kit import save_model, save_tokenizer
from safetensors.torch import load_file
from test_export_formats import WITH_ROWS
from transformers import AutoModelForCausalLM

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.check import check_checkpoint
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.verify import verify_directory

STATIC = ExportConfig(activation_scheme="static", calibration_tokens=256)


def stored_in(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    config = json.loads((directory / "config.json").read_text())
    return load_file(str(directory / "model.safetensors")), config["quantization_config"]


def test_compressed_tensors_carries_them_and_reloads(tmp_path: Path) -> None:
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="transformers reads this format with it"
    )
    base = save_tokenizer(save_model(tmp_path / "base", "qwen3"))
    report = export_checkpoint(base, None, tmp_path / "export", STATIC, WITH_ROWS)
    assert report.format == "compressed_tensors"
    assert report.reload and report.reload.bit_equal
    stored, section = stored_in(tmp_path / "export")
    scales = {name: t for name, t in stored.items() if name.endswith(".input_scale")}
    assert len(scales) == report.quantized == 14
    assert all(t.shape == (1,) and t.dtype == torch.float32 for t in scales.values())
    prefix = "model.layers.0.self_attn."
    assert scales[f"{prefix}q_proj.input_scale"] == scales[f"{prefix}v_proj.input_scale"]
    inputs = section["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"]) == ("tensor", False)
    assert quantization.QuantizationConfig.model_validate(section)
    assert verify_directory(tmp_path / "export") == []
    # but for their scales, the weights are those of the dynamic export
    export_checkpoint(base, None, tmp_path / "dynamic", ExportConfig(format="compressed_tensors"))
    dynamic, _ = stored_in(tmp_path / "dynamic")
    assert dynamic.keys() == stored.keys() - scales.keys()
    same = [torch.equal(dynamic[n].view(torch.uint8), stored[n].view(torch.uint8)) for n in dynamic]
    assert all(same)


def test_another_reader_runs_by_the_scales(tmp_path: Path) -> None:
    """compressed-tensors quantizes inputs by them: as near to BF16 as with scales taken live.

    About 10% on random weights of two layers; a scale that is wrong by a factor of two costs much
    more, on one side by cutting off and on the other only where values become subnormal.
    """
    pytest.importorskip("compressed_tensors", reason="it runs the format in transformers")
    base = save_tokenizer(save_model(tmp_path / "base", "qwen3"))
    ids = torch.arange(10, 50)[None]

    def logits(directory: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        with torch.inference_mode():
            return model(input_ids=ids).logits.float()

    exact = logits(base)
    errors = {}
    for scheme in ("static", "dynamic"):
        settings = replace(STATIC, format="compressed_tensors", activation_scheme=scheme)  # type: ignore[arg-type]
        settings = replace(settings, verify=False)
        export_checkpoint(base, None, tmp_path / scheme, settings, WITH_ROWS)
        errors[scheme] = float((logits(tmp_path / scheme) - exact).norm() / exact.norm())
    assert errors["static"] < 1.1 * errors["dynamic"]


@pytest.mark.parametrize("target", ["lmdeploy", "tensorrt_llm"])
def test_fp8_with_static_scales_is_for_engines_that_want_them(tmp_path: Path, target: str) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    settings = replace(STATIC, format="fp8", target=target)  # type: ignore[arg-type]
    with pytest.raises(SwiftFP8Error, match="only with static") as error:
        export_checkpoint(
            base, None, tmp_path / "export", replace(settings, activation_scheme="dynamic")
        )
    assert "export.activation_scheme=static" in (error.value.fix or "")
    report = export_checkpoint(base, None, tmp_path / "export", settings, WITH_ROWS)
    assert report.read_back and target in report.warnings[0]
    stored, section = stored_in(tmp_path / "export")
    assert section["activation_scheme"] == "static"
    assert stored["model.layers.0.mlp.down_proj.input_scale"].shape == ()
    result = check_checkpoint(tmp_path / "export")
    assert result.sound and target in result.notes[0]


def test_auto_takes_what_the_engine_reads(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    settings = replace(STATIC, verify=False, target="lmdeploy")
    assert export_checkpoint(base, None, tmp_path / "a", settings, WITH_ROWS).format == "fp8"


def test_cache_and_activations_are_measured_together(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    settings = replace(STATIC, kv_cache="fp8", verify=False)
    export_checkpoint(base, None, tmp_path / "export", settings, WITH_ROWS)
    stored, section = stored_in(tmp_path / "export")
    assert section["kv_cache_scheme"] and "model.layers.1.self_attn.v_scale" in stored
    assert "model.layers.1.self_attn.v_proj.input_scale" in stored


@pytest.mark.parametrize(("name", "why"), [("fp8_block", "groups of 128"), ("bf16", "nothing in")])
def test_formats_without_them_are_refused_before_writing(
    tmp_path: Path, name: str, why: str
) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    settings = replace(STATIC, format=name)  # type: ignore[arg-type]
    with pytest.raises(SwiftFP8Error, match=why) as error:
        export_checkpoint(base, None, tmp_path / "export", settings, WITH_ROWS)
    assert error.value.where == "export.activation_scheme"
    assert [path.name for path in tmp_path.iterdir()] == ["base"]

"""An adapter merged into FP8 weights: how much is left, and when that is refused."""

from pathlib import Path

import pytest
import torch
from export_kit import save_model, tiny_model
from peft import LoraConfig, get_peft_model

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.quantize import dequantize, quantize_weight
from swiftfp8.export.survival import SurvivalMeter


@pytest.mark.parametrize(("sigma", "share"), [(1e-4, 0.19), (3e-4, 0.52), (1e-3, 0.96)])
def test_small_updates_are_swallowed(sigma: float, share: float) -> None:
    """Weights of sigma 0.02: known shares, to 0.03 for another sample of 512 x 512."""
    generator = torch.Generator().manual_seed(0)
    base = dequantize(quantize_weight(torch.randn(512, 512, generator=generator) * 0.02))
    update = torch.randn(512, 512, generator=generator) * sigma
    meter = SurvivalMeter()
    meter.add(base + update, update, quantize_weight(base + update))
    assert meter.share == pytest.approx(share, abs=0.03)


def save_adapter(directory: Path, std: float) -> Path:
    config = LoraConfig(r=4, lora_alpha=4, target_modules=["down_proj"])
    model = get_peft_model(tiny_model("llama"), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(directory)
    return directory


def test_merging_into_an_fp8_base(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    settings = ExportConfig(verify=False)
    export_checkpoint(base, None, tmp_path / "fp8", settings)
    small = save_adapter(tmp_path / "small", 0.01)  # updates of 2 * 0.01**2
    with pytest.raises(SwiftFP8Error, match="survives") as caught:
        export_checkpoint(tmp_path / "fp8", small, tmp_path / "export", settings)
    assert "export.format=adapter" in str(caught.value.fix)
    assert not (tmp_path / "export").exists()
    large = save_adapter(tmp_path / "large", 0.05)
    report = export_checkpoint(tmp_path / "fp8", large, tmp_path / "export", settings)
    shares = {e.name: e.survival for e in report.layers if e.survival is not None}
    assert set(shares) == {f"model.layers.{n}.mlp.down_proj" for n in range(2)}
    assert all(0.9 < share < 1.1 for share in shares.values())
    assert "update left" in dict(report.facts())
    kept = export_checkpoint(base, small, tmp_path / "from_bf16", settings)
    assert all(layer.survival is None for layer in kept.layers)

"""An export computed on a GPU equals one computed on the CPU, byte for byte."""

from pathlib import Path

import pytest
import torch
from export_kit import save_model, tiny_model
from peft import LoraConfig, get_peft_model

from swiftfp8.config.schema import ExportConfig
from swiftfp8.export.export import ExportContext, export_checkpoint
from swiftfp8.export.quantize import quantize_weight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("std", [1e-6, 0.02, 3.0])
def test_quantizing_gives_the_same_bytes(std: float) -> None:
    weight = torch.randn(1000, 3000, generator=torch.Generator().manual_seed(0)) * std
    on_cpu, on_gpu = quantize_weight(weight), quantize_weight(weight.cuda())
    assert torch.equal(on_cpu.scale, on_gpu.scale.cpu())
    assert torch.equal(on_cpu.data.view(torch.uint8), on_gpu.data.cpu().view(torch.uint8))


def test_merged_export_is_the_same_file(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3", hidden_size=1024, intermediate_size=2048)
    model = tiny_model("qwen3", hidden_size=1024, intermediate_size=2048)
    adapter = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    torch.manual_seed(1)
    for name, parameter in adapter.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapter.save_pretrained(tmp_path / "adapter")
    files = []
    for device in ("cpu", "cuda"):
        report = export_checkpoint(
            base,
            tmp_path / "adapter",
            tmp_path / device,
            ExportConfig(),
            ExportContext(device=device),
        )
        assert report.reload and report.reload.bit_equal
        files.append((tmp_path / device / "model.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["fp8_block", "compressed_tensors", "fp8", "bf16"])
def test_every_format_is_the_same_file_in_pieces(tmp_path: Path, name: str) -> None:
    """An MLP of 25 million weights a matrix comes in several pieces on the GPU too."""
    base = save_model(
        tmp_path / "base", "llama", hidden_size=2048, intermediate_size=12288, num_hidden_layers=1
    )
    files = []
    for device in ("cpu", "cuda"):
        settings = ExportConfig(format=name, verify=False, max_shard_size="20MB")
        context = ExportContext(device=device)
        report = export_checkpoint(base, None, tmp_path / device, settings, context)
        assert report.shards > 1
        shards = sorted((tmp_path / device).glob("*.safetensors"))
        files.append([shard.read_bytes() for shard in shards])
    assert files[0] == files[1]


def test_an_fp8_base_is_the_same_file(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3", hidden_size=1024, intermediate_size=2048)
    settings = ExportConfig(format="compressed_tensors", verify=False)
    export_checkpoint(base, None, tmp_path / "fp8", ExportConfig(format="fp8_block", verify=False))
    files = []
    for device in ("cpu", "cuda"):
        context = ExportContext(device=device)
        export_checkpoint(tmp_path / "fp8", None, tmp_path / device, settings, context)
        files.append((tmp_path / device / "model.safetensors").read_bytes())
    assert files[0] == files[1]

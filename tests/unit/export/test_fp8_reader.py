"""A quantized checkpoint as a base: dequantized rows, whatever the scale's shape."""

import json
from pathlib import Path

import pytest
import torch
from export_kit import save_model
from safetensors.torch import load_file, save_file

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import CheckpointReader
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.fp8_reader import DequantizingReader, open_tensors
from swiftfp8.export.source import open_source

NAME = "layer.weight"


def stored(
    folder: Path, scale: torch.Tensor, suffix: str
) -> tuple[DequantizingReader, torch.Tensor]:
    """A weight of 300 x 200 with this scale, and its bytes in float32."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    tensors = {NAME: data, f"{NAME}{suffix}": scale, "layer.input_scale": torch.ones(())}
    save_file(tensors, str(folder / "model.safetensors"))
    return DequantizingReader(CheckpointReader(folder)), data.float()


def test_blocks_that_do_not_divide_the_weight(tmp_path: Path) -> None:
    scale = torch.arange(1.0, 7.0).reshape(3, 2) * 0.37
    reader, data = stored(tmp_path, scale, "_scale_inv")
    assert list(reader.specs) == [NAME] and reader.specs[NAME].dtype == "BF16"
    expected = data.clone()
    for row in range(3):
        for column in range(2):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            expected[block] *= scale[row, column]
    assert torch.equal(reader.rows(NAME), expected)
    assert torch.equal(reader.rows(NAME, 100, 260), expected[100:260])


@pytest.mark.parametrize("shape", [(300, 1), (300,), (1,), ()])
def test_channels_and_whole_weights(tmp_path: Path, shape: tuple[int, ...]) -> None:
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
    reader, data = stored(tmp_path, scale, "_scale")
    expected = data * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)
    assert torch.equal(reader.rows(NAME, 17, 290), expected[17:290])


def test_a_scale_that_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match=r"shape \(2, 3\), which does not fit"):
        stored(tmp_path, torch.ones(2, 3), "_scale_inv")
    with pytest.raises(SwiftFP8Error, match="no scale"):
        stored(tmp_path, torch.ones(3, 2), "_elsewhere")


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (torch.full((300, 1), 127, dtype=torch.uint8), "weight_scale is U8"),
        (torch.ones(300, 1, dtype=torch.int32), "weight_scale is I32"),
        (torch.ones(300, 1).index_fill(0, torch.tensor(7), 0.0), "not positive and finite"),
        (torch.ones(300, 1).index_fill(0, torch.tensor(7), -1.0), "not positive and finite"),
        (torch.ones(300, 1).index_fill(0, torch.tensor(7), torch.nan), "not positive and finite"),
        (torch.ones(300, 1).index_fill(0, torch.tensor(7), torch.inf), "not positive and finite"),
    ],
)
def test_scales_that_no_weight_has(tmp_path: Path, scale: torch.Tensor, said: str) -> None:
    """An exponent in a byte, taken for the scale itself, gave weights of thousands."""
    with pytest.raises(SwiftFP8Error, match=said) as caught:
        stored(tmp_path, scale, "_scale")
    assert caught.value.where == str(tmp_path) and caught.value.fix


@pytest.mark.parametrize(
    "block", [128, [0, 0], [128], "ab", [-128, -128], [128.0, 128.0], [True, 1]]
)
def test_a_block_size_that_is_none(tmp_path: Path, block: object) -> None:
    stored(tmp_path, torch.ones(3, 2), "_scale_inv")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    with pytest.raises(SwiftFP8Error, match="not two lengths") as caught:
        open_tensors(tmp_path, config)
    assert "config.json" in str(caught.value.where)


def test_an_fp8_base_exported_again_is_itself(tmp_path: Path) -> None:
    """Power-of-two scales: what was exact in BF16 quantizes to the same bytes."""
    base = save_model(tmp_path / "base")
    settings = ExportConfig(verify=False)
    export_checkpoint(base, None, tmp_path / "once", settings)
    export_checkpoint(tmp_path / "once", None, tmp_path / "twice", settings)
    once, twice = (load_file(str(tmp_path / n / "model.safetensors")) for n in ("once", "twice"))
    assert once.keys() == twice.keys()
    for name, tensor in once.items():
        if name.endswith("_scale_inv"):  # a block may fit a smaller scale than its original did
            continue
        value = tensor.float() * _scale(once, name)
        assert torch.equal(value, twice[name].float() * _scale(twice, name)), name


def _scale(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    scale = tensors.get(f"{name}_scale_inv")
    if scale is None:
        return torch.ones(())
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)


def test_an_fp8_base_in_bf16_has_no_quantization_left(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", intermediate_size=448)
    export_checkpoint(base, None, tmp_path / "fp8", ExportConfig(format="compressed_tensors"))
    report = export_checkpoint(
        tmp_path / "fp8", None, tmp_path / "out", ExportConfig(format="bf16")
    )
    assert report.reload and report.reload.bit_equal
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    expected = open_source(tmp_path / "fp8")
    name = "model.layers.1.mlp.down_proj.weight"
    found = load_file(str(tmp_path / "out" / "model.safetensors"))[name]
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.merged(name))

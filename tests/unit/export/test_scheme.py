"""Formats with one scale per channel and per weight: values, shapes, shared scales, the hook."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_kit import save_model
from safetensors.torch import load_file

from swiftfp8.export.export import find_format
from swiftfp8.export.layout import FormatOptions, WriteJob
from swiftfp8.export.quantize import QuantizedTensor, quantize_weight
from swiftfp8.export.source import open_source

Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")


def written(base: Path, target: Path, name: str, **options: object) -> dict[str, torch.Tensor]:
    source, export_format = open_source(base), find_format(name)
    layout = export_format.describe(source, FormatOptions(**options))
    target.mkdir()
    export_format.write(source, layout, target, WriteJob(max_shard_bytes=1 << 30))
    tensors = load_file(str(target / "model.safetensors"))
    for key, expected in export_format.reference(source, layout):
        if key in layout.quantized:
            value = tensors[key].float() * tensors[f"{key}_scale"]
            assert torch.equal(value.bfloat16(), expected)
    return tensors


def test_one_scale_per_channel(tmp_path: Path) -> None:
    """Each scale is the smallest power of two that holds its own row; widths of 320 are FP8 too."""
    base = save_model(tmp_path / "base", intermediate_size=320)
    original = load_file(str(base / "model.safetensors"))
    tensors = written(base, tmp_path / "out", "compressed_tensors")
    for key in (Q, "model.layers.0.mlp.down_proj.weight"):
        scale = tensors[f"{key}_scale"]
        assert scale.dtype == torch.float32 and scale.shape == (original[key].shape[0], 1)
        needed = original[key].float().abs().amax(1, keepdim=True) / 448
        assert ((scale >= needed) & (scale / 2 < needed)).all()
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn


def test_a_fused_group_shares_its_scale(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "qwen3_moe")
    original = load_file(str(base / "model.safetensors"))
    tensors = written(base, tmp_path / "out", "fp8")
    scales = [tensors[f"{key}_scale"] for key in (Q, K, V)]
    assert all(scale.shape == () and scale == scales[0] for scale in scales)
    largest = max(original[key].float().abs().max() for key in (Q, K, V))
    assert largest / 448 <= scales[0] < 2 * largest / 448
    expert = "model.layers.1.mlp.experts.2."
    gate, up = (tensors[f"{expert}{name}_proj.weight_scale"] for name in ("gate", "up"))
    assert gate == up
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["compressed_tensors", "fp8"])
def test_the_quantizer_is_asked_for_every_piece(tmp_path: Path, name: str) -> None:
    """A quantizer that halves what it is given: seen in the file, at the right rows."""
    base = save_model(tmp_path / "base")
    seen: dict[str, list[tuple[int, int]]] = {}

    def halve(
        name: str,
        first_row: int,
        weight_NK: torch.Tensor,
        block: tuple[int, int],
        scale: torch.Tensor | None,
    ) -> QuantizedTensor:
        seen.setdefault(name, []).append((first_row, weight_NK.shape[0]))
        return quantize_weight(weight_NK / 2, block, scale)

    plain = written(base, tmp_path / "plain", name)
    halved = written(base, tmp_path / "halved", name, quantizer=halve)
    assert len(seen) == 14
    assert all(sum(rows for _, rows in pieces[: len(pieces) // 2]) for pieces in seen.values())
    ratio = (halved[Q].float() * halved[f"{Q}_scale"]).norm() / (
        plain[Q].float() * plain[f"{Q}_scale"]
    ).norm()
    assert ratio == pytest.approx(0.5, rel=1e-2)


def test_static_input_scales(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    source, export_format = open_source(base), find_format("fp8")
    layout = export_format.describe(source, FormatOptions())
    amax = {name.removesuffix(".weight"): 896.0 for name in layout.quantized}
    layout = export_format.describe(source, replace(FormatOptions(), input_amax=amax))
    (tmp_path / "out").mkdir()
    export_format.write(source, layout, tmp_path / "out", WriteJob(max_shard_bytes=1 << 30))
    tensors = load_file(str(tmp_path / "out" / "model.safetensors"))
    assert tensors[Q.replace("weight", "input_scale")] == 2.0

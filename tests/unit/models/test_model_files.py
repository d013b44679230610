"""Faults in a checkpoint's files are found before anything is loaded, and named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from model_dirs import edit_json, write_model

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.checkpoint import check_checkpoint, check_safetensors


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several shards."""
    return write_model(tmp_path_factory.mktemp("sound"), max_shard_size="20KB")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def complaint(path: Path) -> str:
    with pytest.raises(SwiftFP8Error) as caught:
        check_checkpoint(path)
    return str(caught.value)


def test_a_sound_checkpoint_passes(model: Path) -> None:
    assert len(list(model.glob("*.safetensors"))) > 1
    check_checkpoint(model)


def test_a_truncated_shard_is_named_with_its_sizes(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    text = complaint(model)
    assert f"{shard.name} is truncated: expected {size} bytes, found {size - 100}" in text


@pytest.mark.parametrize("left", [0, 4, 40])
def test_a_shard_cut_inside_its_header(model: Path, left: int) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    os.truncate(shard, left)
    assert f"{shard.name} is not a sound safetensors file" in complaint(model)


def test_a_git_lfs_pointer_is_no_safetensors_file(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git-lfs pointer" in complaint(model)


def test_trailing_bytes_are_a_fault(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]
    with shard.open("ab") as file:
        file.write(b"\0")
    assert "too long" in complaint(model)


def test_a_shard_that_the_index_lists_is_missing(model: Path) -> None:
    shard = sorted(model.glob("*.safetensors"))[-1]
    shard.unlink()
    assert f"weight file {shard.name} is missing" in complaint(model)


def test_a_tensor_that_the_index_promises_is_absent(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={**weight_map, "model.extra": next(iter(weight_map.values()))})
    assert "model.extra" in complaint(model)


def test_shards_without_an_index(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in complaint(model)


def test_no_weights(model: Path) -> None:
    for file in (*model.glob("*.safetensors"), model / "model.safetensors.index.json"):
        file.unlink()
    assert "has no weights" in complaint(model)
    (model / "pytorch_model.bin").write_bytes(b"x")
    assert "only safetensors" in complaint(model)


def test_bad_json_names_line_and_column(model: Path) -> None:
    (model / "config.json").write_text('{\n  "model_type": "qwen3",\n  oops\n}')
    text = complaint(model)
    assert "not valid JSON" in text
    assert "line 3, column 3" in text


def test_no_config_and_no_model_type(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert "no model_type" in complaint(model)
    (model / "config.json").unlink()
    assert "not a Hugging Face model directory" in complaint(model)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in complaint(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_quantized_checkpoint_is_refused(model: Path, nested: bool) -> None:
    settings = {"quantization_config": {"quant_method": "fp8"}}
    edit_json(model / "config.json", **({"text_config": settings} if nested else settings))
    assert "already quantized (quant_method fp8)" in complaint(model)


def test_check_safetensors_returns_the_names(model: Path) -> None:
    names = set().union(*(check_safetensors(shard) for shard in model.glob("*.safetensors")))
    assert names == set(
        json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    )

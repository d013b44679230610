"""Safetensors in pieces: what is written is what safetensors reads, and damage has a name."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import (
    CheckpointReader,
    CheckpointWriter,
    TensorSpec,
    parse_size,
    read_json,
)

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(4, 3),
    "b": torch.randn(5, 2, 2).bfloat16(),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.randn(3, 4).to(torch.float8_e4m3fn),
}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}


def write_all(directory: Path, max_shard_bytes: int) -> None:
    specs = [
        TensorSpec(name=name, dtype=NAMES.get(t.dtype, "F8_E4M3"), shape=tuple(t.shape))
        for name, t in TENSORS.items()
    ]
    with CheckpointWriter(directory, specs, max_shard_bytes) as writer:
        for name, tensor in TENSORS.items():
            for row in tensor if tensor.dim() else [tensor]:
                writer.write(name, row)


def test_pieces_make_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    write_all(tmp_path, 10**6)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    loaded = load_file(str(tmp_path / "model.safetensors"))
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].float(), tensor.float())
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_shards_and_their_index(tmp_path: Path) -> None:
    write_all(tmp_path, 60)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == list(TENSORS)
    assert index["metadata"]["total_size"] == 48 + 40 + 8 + 12
    assert len(set(index["weight_map"].values())) == 2
    reader = CheckpointReader(tmp_path)
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.rows(name).float(), tensor.float())
    assert torch.equal(reader.rows("b", 1, 3), TENSORS["b"][1:3])


def test_an_interrupted_writer_leaves_no_index(tmp_path: Path) -> None:
    specs = [TensorSpec(name=n, dtype="F32", shape=(8,)) for n in "ab"]
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path, specs, 32) as writer:
        writer.write("a", torch.zeros(8))
        raise KeyboardInterrupt
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("cut", [4, 20, -1])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, str(file))
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(SwiftFP8Error, match="damaged safetensors") as caught:
        CheckpointReader(tmp_path)
    assert caught.value.where == str(file)


def write_raw(file: Path, header: object, data: bytes = bytes(8)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([], "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        ({"a": [1]}, "tensor a has no type"),
        ({"a": {key: GOOD[key] for key in ("shape", "data_offsets")}}, "tensor a has no type"),
        ({"a": GOOD | {"dtype": ["F32"]}}, "tensor a has no type"),
        ({"a": GOOD | {"shape": [1.0]}}, "tensor a has no type"),
        ({"a": GOOD | {"shape": [-1]}}, "tensor a has no type"),
        ({"a": GOOD | {"data_offsets": [-4, 0]}}, "tensor a has no type"),
        ({"a": GOOD | {"data_offsets": None}}, "tensor a has no type"),
        ({"a": GOOD | {"data_offsets": [0, 4, 8]}}, "3 data_offsets"),
        ({"a": GOOD, "b": GOOD | {"shape": [2], "data_offsets": [0, 8]}}, "tensor b overlaps"),
        ({"a": GOOD | {"data_offsets": [4, 8]}}, "tensor a has a gap"),
    ],
)
def test_a_header_that_no_writer_writes(tmp_path: Path, header: object, said: str) -> None:
    file = tmp_path / "model.safetensors"
    write_raw(file, header)
    with pytest.raises(SwiftFP8Error, match=said) as caught:
        CheckpointReader(tmp_path)
    assert caught.value.where == str(file) and caught.value.fix


def test_a_type_that_is_not_read_is_no_damage(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}}
    write_raw(tmp_path / "model.safetensors", header)
    with pytest.raises(SwiftFP8Error, match="type F8_E8M0, which swiftfp8 does not read"):
        CheckpointReader(tmp_path)


def test_empty_tensors_overlap_nothing(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}
    header = {"a": GOOD, "b": GOOD | {"data_offsets": [4, 8]}, "c": empty}
    write_raw(tmp_path / "model.safetensors", header)
    assert sorted(CheckpointReader(tmp_path).specs) == ["a", "b", "c"]


@pytest.mark.parametrize("weight_map", [None, ["a"], {"a": 1}, {"a": None}, {"a": ["b"]}])
def test_an_index_of_odd_types(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(SwiftFP8Error, match="weight_map is no JSON object"):
        CheckpointReader(tmp_path)


def test_json_too_deep_to_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(SwiftFP8Error, match="not valid JSON"):
        read_json(tmp_path / "config.json")


def test_missing_weights_and_shards(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="no safetensors"):
        CheckpointReader(tmp_path)
    write_all(tmp_path, 60)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SwiftFP8Error, match="model-00002-of-00002"):
        CheckpointReader(tmp_path)


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "2 GiB", "1.5MB", "1000")] == [
        5 * 10**9,
        2**31,
        1_500_000,
        1000,
    ]
    for text in ("", "five", "5XB", "0", "-1GB", "0.1KB1"):
        with pytest.raises(SwiftFP8Error, match="not a size"):
            parse_size(text)

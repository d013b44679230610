"""Every fault that was planted in a good export is found, by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_kit import save_model, save_tokenizer
from safetensors.torch import load_file, save_file

from swiftfp8.config.schema import ExportConfig
from swiftfp8.export.check import check_checkpoint
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.verify import verify_directory

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
K = "model.layers.0.self_attn.k_proj"
NORM = "model.layers.0.input_layernorm.weight"
PARTS = ("gate", "up", "down")


@pytest.fixture(scope="module")
def good_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded export with one excluded linear (o_proj of every layer) and a tokenizer file."""
    root = tmp_path_factory.mktemp("structure")
    base = save_model(root / "base")
    save_tokenizer(base)
    settings = ExportConfig(verify=False, exclude=["o_proj"], max_shard_size="300KB")
    export_checkpoint(base, None, root / "export", settings)
    return root / "export"


def edit_config(directory: Path, change: Callable[[dict], None]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def edit_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for file in directory.glob("*.safetensors"):
        tensors = load_file(str(file))
        if name in tensors:
            tensors[name] = change(tensors[name]).contiguous()
            save_file(tensors, str(file), metadata={"format": "pt"})


def unlist(directory: Path) -> None:
    edit_config(
        directory, lambda s: s["modules_to_not_convert"].remove("model.layers.0.self_attn.o_proj")
    )


def suffix(directory: Path) -> None:
    edit_config(directory, lambda s: s.update(modules_to_not_convert=["lm_head", "o_proj"]))


def unlist_head(directory: Path) -> None:
    edit_config(directory, lambda s: s["modules_to_not_convert"].remove("lm_head"))


def wrong_block(directory: Path) -> None:
    edit_config(directory, lambda s: s.update(weight_block_size=[64, 64]))


def bf16_scale(directory: Path) -> None:
    edit_tensor(directory, f"{Q}.weight_scale_inv", lambda t: t.bfloat16())


def scale_shape(directory: Path) -> None:
    edit_tensor(directory, f"{Q}.weight_scale_inv", lambda t: t[:1])


def negative_scale(directory: Path) -> None:
    edit_tensor(directory, f"{DOWN}.weight_scale_inv", lambda t: -t)


def nan_byte(directory: Path) -> None:
    def plant(tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor.view(torch.uint8).clone()
        raw[-1, -1] = 0xFF
        return raw.view(torch.float8_e4m3fn)

    edit_tensor(directory, f"{DOWN}.weight", plant)


def nan_norm(directory: Path) -> None:
    edit_tensor(directory, NORM, lambda t: t.index_fill(0, torch.tensor(3), torch.nan))


def mixed_group(directory: Path) -> None:
    edit_tensor(directory, f"{K}.weight", lambda t: t.bfloat16())
    edit_config(directory, lambda s: s["modules_to_not_convert"].append(K))


def three_dimensions(directory: Path) -> None:
    edit_tensor(directory, f"{DOWN}.weight", lambda t: t[None])


def missing_shard(directory: Path) -> None:
    next(directory.glob("model-00002*")).unlink()


def truncated(directory: Path) -> None:
    file = next(directory.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-100])


def index_disagrees(directory: Path) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"][f"{Q}.weight"]
    file.write_text(json.dumps(index))


def damaged_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_bytes(bytes(range(256)))


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def partly_missing_scale(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        tensors = load_file(str(file))
        if tensors.pop(f"{Q}.weight_scale_inv", None) is not None:
            save_file(tensors, str(file), metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": shard_of_every_tensor(directory)})
    )


def shard_of_every_tensor(directory: Path) -> dict[str, str]:
    return {name: f.name for f in directory.glob("*.safetensors") for name in load_file(str(f))}


FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (unlist, "model.layers.0.self_attn.o_proj: is BF16 but not listed"),
    (suffix, "'o_proj' is no full name"),
    (unlist_head, "the output head lm_head is not listed"),
    (wrong_block, "weight_block_size is not [128, 128]"),
    (bf16_scale, f"{Q}.weight_scale_inv: is BF16, not F32"),
    (scale_shape, f"{Q}.weight_scale_inv: has shape (1, 2), not (2, 2)"),
    (negative_scale, f"{DOWN}.weight_scale_inv: holds scales that are not positive"),
    (nan_byte, f"{DOWN}.weight: holds NaN bytes"),
    (nan_norm, f"{NORM}: holds NaN or infinity"),
    (mixed_group, "mixed precision in a fused group"),
    (three_dimensions, f"{DOWN}.weight: is FP8 with 3 dimensions"),
    (missing_shard, "weights are missing"),
    (truncated, "damaged safetensors file"),
    (index_disagrees, f"{Q}.weight: is in "),
    (no_tokenizer, "no tokenizer files"),
    (damaged_tokenizer, "tokenizer.json is not valid JSON"),
    (partly_missing_scale, f"{Q}.weight: has no weight_scale_inv"),
]


def test_the_good_export_has_none(good_export: Path) -> None:
    assert len(list(good_export.glob("*.safetensors"))) > 3
    assert verify_directory(good_export) == []
    assert check_checkpoint(good_export).sound


@pytest.mark.parametrize(("plant", "expected"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_planted_fault_is_found(
    good_export: Path, tmp_path: Path, plant: Callable[[Path], None], expected: str
) -> None:
    copy = tmp_path / "export"
    shutil.copytree(good_export, copy)
    plant(copy)
    result = check_checkpoint(copy)
    found = [f"{fault.where}: {fault.what}" for fault in result.faults]
    assert any(expected in text for text in found), found
    assert not result.sound


def test_a_tied_head_stored_twice(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama_tied")
    save_tokenizer(base)
    settings = ExportConfig(verify=False)
    export_checkpoint(base, None, tmp_path / "export", settings)
    file = str(tmp_path / "export" / "model.safetensors")
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    faults = verify_directory(tmp_path / "export")
    assert [f.where for f in faults if "second time" in f.what] == ["lm_head.weight"]


def export(root: Path, family: str, name: str) -> Path:
    """A small export of one file, with a tokenizer file."""
    base = save_model(root / "base", family)
    save_tokenizer(base)
    export_checkpoint(base, None, root / "export", ExportConfig(verify=False, format=name))
    return root / "export"


def faults_of(directory: Path) -> list[str]:
    return [f"{fault.where}: {fault.what}" for fault in check_checkpoint(directory).faults]


def test_experts_as_one_3d_tensor(tmp_path: Path) -> None:
    """In FP8 no engine takes them; in BF16 their module must be listed."""
    directory = export(tmp_path, "qwen3_moe", "fp8_block")
    assert faults_of(directory) == []
    file = str(directory / "model.safetensors")
    good = {name: tensor.clone() for name, tensor in load_file(file).items()}
    experts = "model.layers.0.mlp.experts"
    kept = {name: tensor for name, tensor in good.items() if not name.startswith(experts)}
    parts = {part: [good[f"{experts}.{n}.{part}_proj.weight"] for n in range(4)] for part in PARTS}
    gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    stacked = {
        f"{experts}.down_proj": torch.stack(parts["down"]),
        f"{experts}.gate_up_proj": torch.stack(gate_up),
    }
    save_file({**kept, **stacked}, file)
    assert faults_of(directory) == [f"{name}: is FP8 with 3 dimensions, not 2" for name in stacked]
    save_file({**kept, **{name: t.to(torch.bfloat16) for name, t in stacked.items()}}, file)
    assert f"3 dimensions, and {experts} is not listed" in faults_of(directory)[0]
    edit_config(directory, lambda s: s["modules_to_not_convert"].append(experts))
    assert faults_of(directory) == []


def test_an_unlisted_gate(tmp_path: Path) -> None:
    directory = export(tmp_path, "qwen3_moe", "fp8_block")
    gate = "model.layers.0.mlp.gate"
    edit_config(directory, lambda s: s["modules_to_not_convert"].remove(gate))
    assert faults_of(directory) == [f"{gate}: is BF16 but not listed"]


def test_faults_of_compressed_tensors(tmp_path: Path) -> None:
    directory = export(tmp_path, "llama", "compressed_tensors")
    assert faults_of(directory) == []
    scale = f"{Q}.weight_scale"
    edit_tensor(directory, scale, lambda t: t.bfloat16())
    assert faults_of(directory) == [f"{scale}: is BF16, not F32"]
    edit_tensor(directory, scale, lambda t: t.float()[:64])
    assert faults_of(directory) == [f"{scale}: has shape (64, 1), not (256, 1)"]
    edit_tensor(directory, scale, lambda t: torch.ones(256))
    assert faults_of(directory) == []  # [N] is read as [N, 1] everywhere
    edit_tensor(directory, scale, lambda t: t.view(1, 256))
    assert faults_of(directory) == [f"{scale}: has shape (1, 256), not (256, 1)"]
    edit_tensor(directory, scale, lambda t: t.view(256, 1))
    edit_config(directory, lambda s: s.update(ignore=["re:.*lm_head", "re:.*mlp[.]down_proj"]))
    found = faults_of(directory)
    assert [text for text in found if "listed as not converted" in text] == found != []
    edit_config(directory, lambda s: s.update(ignore=[], format="pack-quantized"))
    found = faults_of(directory)
    assert any("lm_head is not listed" in text for text in found)
    assert any("format is 'pack-quantized'" in text for text in found)


def test_a_fused_group_with_several_scales_is_a_warning(tmp_path: Path) -> None:
    directory = export(tmp_path, "llama", "fp8")
    edit_tensor(directory, f"{Q}.weight_scale", lambda t: t * 2)
    result = check_checkpoint(directory)
    assert result.sound
    assert "several scales" in result.faults[0].what
    assert any("nonsense" in note for note in result.notes)


def test_fp8_bytes_that_nothing_declares(tmp_path: Path) -> None:
    directory = export(tmp_path, "llama", "fp8_block")
    file = directory / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    assert any("has no quantization_config" in text for text in faults_of(directory))

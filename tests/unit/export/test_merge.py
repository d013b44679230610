"""Merging equals PEFT's own merge, and refuses what it would get wrong."""

import json
from pathlib import Path

import pytest
import torch
from export_kit import save_model, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import CheckpointReader
from swiftfp8.export.merge import MergedCheckpoint, load_adapter
from swiftfp8.export.source import open_source


def save_adapter(directory: Path, family: str = "llama", **options: object) -> torch.nn.Module:
    """Save an adapter with random A and B on `tiny_model`; returns PEFT's float32 merge."""
    model = tiny_model(family).float()
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
        elif "modules_to_save" in name:
            parameter.data += 0.5
    peft_model.save_pretrained(directory)
    return peft_model.merge_and_unload()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8},
            "alpha_pattern": {"up_proj": 3},
        },
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"use_dora": True},
    ],
)
def test_equals_pefts_merge(tmp_path: Path, options: dict[str, object]) -> None:
    base = save_model(tmp_path / "base")
    expected = save_adapter(tmp_path / "adapter", **options).state_dict()
    merged = MergedCheckpoint(CheckpointReader(base), load_adapter(tmp_path / "adapter"))
    assert merged.specs.keys() == expected.keys()
    changed = 0
    for name, tensor in expected.items():
        ours = merged.rows(name).float()
        # float32 sums in another order: a few units in the last place of values below 1
        torch.testing.assert_close(ours, tensor.float(), rtol=1e-6, atol=1e-7)
        changed += merged.changed(name)
        if not merged.changed(name):
            assert torch.equal(ours, tensor.float())
    assert changed == (3 if "modules_to_save" in options else 14)


def test_rows_equal_the_whole(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    merged = MergedCheckpoint(CheckpointReader(base), load_adapter(tmp_path / "adapter"))
    name = "model.layers.0.mlp.up_proj.weight"
    parts = [merged.rows(name, start, start + 128) for start in (0, 128, 256)]
    assert torch.equal(torch.cat(parts), merged.rows(name))


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(directory: Path, old: str, new: str) -> None:
    file = str(directory / "adapter_model.safetensors")
    save_file({key.replace(old, new): value for key, value in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"peft_type": "IA3"}, "not LoRA"),
        ({"bias": "all"}, "trains biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changing the base weights"),
        ({"r": 16}, "do not fit r=16"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "bare parameters"),
    ],
)
def test_refused_adapters(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    save_adapter(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(SwiftFP8Error, match=message):
        load_adapter(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layers.1.mlp.up_proj", "layers.7.mlp.up_proj"),  # a layer that the base lacks
        ("lora_A.weight", "lora_embedding_A"),  # not a linear
        ("layers.0.self_attn.q_proj.lora_B", "layers.0.self_attn.q_proj.lora_C"),  # half a pair
    ],
)
def test_nothing_stays_unmerged_in_silence(tmp_path: Path, old: str, new: str) -> None:
    base = save_model(tmp_path / "base")
    save_adapter(tmp_path / "adapter")
    edit_weights(tmp_path / "adapter", old, new)
    with pytest.raises(SwiftFP8Error, match="match no weight"):
        MergedCheckpoint(CheckpointReader(base), load_adapter(tmp_path / "adapter"))


def test_an_adapter_of_another_width(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", intermediate_size=512)
    save_adapter(tmp_path / "adapter")
    with pytest.raises(SwiftFP8Error, match="the base has"):
        MergedCheckpoint(CheckpointReader(base), load_adapter(tmp_path / "adapter"))


def test_nan_in_the_adapter(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    file = str(tmp_path / "adapter_model.safetensors")
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(SwiftFP8Error, match="NaN"):
        load_adapter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"r": None}, "r or rank_pattern"),
        ({"r": "4"}, "r or rank_pattern"),
        ({"r": 0}, "r or rank_pattern"),
        ({"lora_alpha": None}, "lora_alpha or alpha_pattern"),
        ({"lora_alpha": "much"}, "lora_alpha or alpha_pattern"),
        ({"rank_pattern": {"q_proj": "4"}}, "r or rank_pattern"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
    ],
)
def test_a_configuration_without_its_numbers_is_named(
    tmp_path: Path, changes: dict[str, object], key: str
) -> None:
    save_adapter(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(SwiftFP8Error) as caught:
        load_adapter(tmp_path)
    assert caught.value.where == f"{tmp_path / 'adapter_config.json'}: {key}"


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_a_number_that_is_not_there_is_named(tmp_path: Path, key: str) -> None:
    save_adapter(tmp_path)
    file = tmp_path / "adapter_config.json"
    said = json.loads(file.read_text())
    del said[key]
    file.write_text(json.dumps(said))
    with pytest.raises(SwiftFP8Error, match=f"{key} of .*_proj is None"):
        load_adapter(tmp_path)


def test_an_adapter_in_fp8_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path)
    file = str(tmp_path / "adapter_model.safetensors")
    save_file({key: value.to(torch.float8_e4m3fn) for key, value in load_file(file).items()}, file)
    with pytest.raises(SwiftFP8Error, match=r"lora_A.weight is float8_e4m3fn") as caught:
        load_adapter(tmp_path)
    assert caught.value.where == file


def test_a_head_that_the_model_ties_can_not_be_replaced(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama_tied")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    save_adapter(tmp_path / "adapter", "llama_tied", **options)
    with pytest.raises(SwiftFP8Error, match=r"replaces lm_head.weight, which this model ties"):
        open_source(base, tmp_path / "adapter")

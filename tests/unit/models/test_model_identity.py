from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from model_dirs import edit_json, write_model
from model_kit import plan_for
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.identity import digest_model
from swiftfp8.train.checkpoint import write_checkpoint
from swiftfp8.train.weights import check_fingerprint, fingerprint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", max_shard_size="20KB")


def copied(base: Path, name: str) -> Path:
    return Path(shutil.copytree(base, base.parent / name / base.name))


def tuned(base: Path) -> tuple[Path, str]:
    """The same model with every weight of one shard moved a little; its place, and that shard."""
    other = copied(base, "tuned")
    shard = sorted(other.glob("*.safetensors"))[1]
    tensors = {name: tensor * 1.01 for name, tensor in load_file(shard).items()}
    save_file(tensors, shard, metadata={"format": "pt"})
    return other, shard.name


def checkpoint(folder: Path, mark: dict[str, object]) -> Path:
    folder.mkdir()
    return write_checkpoint(folder, 1, lambda part: None, {"fingerprint": mark})


def test_a_model_keeps_its_digest_wherever_it_lies(base: Path) -> None:
    other = copied(base, "elsewhere")
    edit_json(other / "config.json", transformers_version="9.9", _name_or_path="x", use_cache=False)
    assert digest_model(other) == digest_model(base)
    assert len(digest_model(base)) == 1 + len(list(base.glob("*.safetensors"))) > 2


def test_other_weights_and_another_configuration_show(base: Path) -> None:
    other, shard = tuned(base)
    edit_json(other / "config.json", rope_theta=5.0)
    before, after = digest_model(base), digest_model(other)
    assert {name for name in before if before[name] != after[name]} == {"config.json", shard}


def test_a_file_smaller_than_a_sample_has_a_digest(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    save_file({"x": torch.ones(3)}, model / "model.safetensors")
    one = digest_model(model)
    save_file({"x": torch.zeros(3)}, model / "model.safetensors")
    assert one != digest_model(model)


def test_a_resume_refuses_another_base_of_the_same_name_and_shape(base: Path) -> None:
    other, shard = tuned(base)
    path = checkpoint(base.parent / "run", {"model": "base", "base": digest_model(base)})
    check_fingerprint(path, {"model": "base", "base": digest_model(base)})
    with pytest.raises(SwiftFP8Error, match=f"base model is another one: {shard} changed"):
        check_fingerprint(path, {"model": "base", "base": digest_model(other)})


def test_a_run_remembers_the_files_of_its_base(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    mark = fingerprint(plan_for(model, recipe=None), model)
    assert mark["base"] == digest_model(base)


def test_a_checkpoint_that_does_not_know_its_base_still_resumes(base: Path) -> None:
    path = checkpoint(base.parent / "run", {"model": "base"})
    check_fingerprint(path, {"model": "base", "base": digest_model(base)})

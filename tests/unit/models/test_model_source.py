"""From what the user writes to a local directory: every way to name a model, and every mistake."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from model_dirs import write_model

from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models import source as module
from swiftfp8.models.source import resolve_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sources") / "my model")


def complaint(**options: object) -> str:
    with pytest.raises(SwiftFP8Error) as caught:
        resolve_source(Config(**options))
    return str(caught.value)


def test_a_local_directory(model: Path) -> None:
    source = resolve_source(Config(model=str(model)))
    assert (source.name, source.path, source.family.name) == ("my-model", model, "qwen3")
    assert source.origin == str(model)


def test_a_relative_directory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    source = resolve_source(Config(model="."))
    assert (source.name, source.path) == ("my-model", model)


def test_neither_model_nor_model_type() -> None:
    assert "no model given" in complaint()


def test_the_asked_family_wins_where_the_architecture_is_shared(tmp_path: Path) -> None:
    path = write_model(tmp_path, "qwen2", tokenizer=False)
    assert resolve_source(Config(model=str(path))).family.name == "qwen2_5"
    asked = Config(model=str(path), model_type="qwen2")
    assert resolve_source(asked).family.name == "qwen2"


def test_a_mismatched_family_says_what_the_checkpoint_is(model: Path) -> None:
    text = complaint(model=str(model), model_type="llama3")
    assert "model_type=llama3 doesn't fit: the checkpoint is qwen3" in text
    assert "model_type=qwen3" in text


@pytest.mark.parametrize("written", ["./nowhere", "/nowhere/at/all", "~/no-such-model-dir", "a b"])
def test_a_path_that_does_not_exist(written: str) -> None:
    assert "no such model directory" in complaint(model=written)


def test_a_directory_without_config(tmp_path: Path) -> None:
    assert "no config.json" in complaint(model=str(tmp_path))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "not GGUF" in complaint(model=str(file))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"nonsense")
    assert "not a GGUF file" in complaint(model=str(file))


def test_several_gguf_files_in_a_folder(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "several GGUF files: a.gguf, b.gguf" in complaint(model=str(tmp_path))


def test_a_part_of_a_split_gguf(tmp_path: Path) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    file.write_bytes(b"GGUF")
    assert "one part of several" in complaint(model=str(file))


def test_a_hub_id_takes_only_the_needed_files(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def fake(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(repo=repo, allow=allow_patterns, ignore=ignore_patterns)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    source = resolve_source(Config(model="Owner/Model-1B"))
    assert (source.name, source.path, source.origin) == ("Model-1B", model, "Owner/Model-1B")
    assert asked["repo"] == "Owner/Model-1B"
    assert "*.safetensors" in asked["allow"]
    assert "*.bin" not in asked["allow"]
    assert "consolidated*" in asked["ignore"]


def test_a_family_alone_takes_its_default(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "download", lambda name, hub: model)
    source = resolve_source(Config(model_type="qwen3"))
    assert (source.origin, source.name) == ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")


def test_a_registered_name_is_a_model_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless something on disk has that name."""
    assert resolve_source(Config(model="tiny")) == resolve_source(Config(model_type="tiny"))
    monkeypatch.chdir(model.parent)
    (model.parent / "tiny").symlink_to(model)
    assert resolve_source(Config(model="tiny")).path == model


def test_a_registered_name_beside_its_own_family() -> None:
    """As `config=quickstart model=tiny` puts them together."""
    both = resolve_source(Config(model="tiny", model_type="tiny"))
    assert both == resolve_source(Config(model_type="tiny"))
    text = complaint(model="qwen3", model_type="tiny")
    assert "model_type=tiny doesn't fit: model= names family qwen3" in text
    assert "model_type=qwen3" in text


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SwiftFP8Error) as caught:
        resolve_source(Config(model="Owner/Model"))
    assert "no local directory 'Owner/Model', and it can't be fetched" in str(caught.value)
    assert "local directory" in str(caught.value.fix)
    assert (
        caught.value.__cause__ is None and caught.value.__suppress_context__
    )  # a Python user is told no more than this


def test_modelscope_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    text = complaint(model="Owner/Model", hub="modelscope")
    assert "pip install 'swiftfp8[modelscope]'" in text


def test_modelscope(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(snapshot_download=lambda repo, **options: str(model))
    monkeypatch.setitem(sys.modules, "modelscope", fake)
    assert resolve_source(Config(model="Owner/Model", hub="modelscope")).path == model


def test_the_embedded_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "assets_dir", lambda: model.parent)
    source = resolve_source(Config(model_type="tiny"))
    assert (source.name, source.family.name) == ("tiny", "tiny")
    assert source.path == model.parent / "tiny"

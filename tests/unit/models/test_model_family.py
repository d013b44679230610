"""Families read from YAML: names, aliases, and which checkpoint belongs to which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models import family as module
from swiftfp8.models.family import (
    describe_models,
    family_named,
    family_names,
    family_of,
    load_families,
)


def test_no_two_families_share_a_name_or_alias() -> None:
    names = [
        name.lower()
        for family in load_families().values()
        for name in (family.name, *family.aliases)
    ]
    assert len(names) == len(set(names))


def test_only_one_family_is_assumed_for_an_architecture() -> None:
    claims = [
        model_type
        for family in load_families().values()
        if family.assumed
        for model_type in family.model_types
    ]
    assert len(claims) == len(set(claims))


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("qwen2.5", "qwen2_5"),
        ("qwen2_5", "qwen2_5"),
        ("Qwen3", "qwen3"),
        ("llama3.1", "llama3"),
        ("gemma3_text", "gemma3"),
        ("tiny", "tiny"),
    ],
)
def test_names_aliases_and_case(written: str, name: str) -> None:
    assert family_named(written).name == name


def test_a_misspelt_family_gets_a_suggestion() -> None:
    with pytest.raises(SwiftFP8Error) as caught:
        family_named("qwne3")
    assert caught.value.fix == "did you mean qwen3?"


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "qwen2", "vocab_size": 152064}, "qwen2_5"),
        ({"model_type": "qwen3", "vocab_size": 151936}, "qwen3"),
        ({"model_type": "llama", "vocab_size": 32000}, "llama2"),
        ({"model_type": "llama", "vocab_size": 128256}, "llama3"),
        ({"model_type": "llama", "vocab_size": 49152}, "llama3"),
        ({"model_type": "mistral", "vocab_size": 32768}, "mistral"),
        ({"model_type": "gemma3", "text_config": {"vocab_size": 262208}}, "gemma3"),
    ],
)
def test_family_of_a_checkpoint(config: dict[str, object], name: str) -> None:
    assert family_of(config).name == name


def test_an_architecture_without_a_file_gets_a_generic_family() -> None:
    family = family_of({"model_type": "phi3"})
    assert (family.name, family.generic, family.keep_high) == ("phi3", True, {})
    assert family.accepts("phi3")


def test_gemma3_keeps_its_vision_parts_out_of_fp8_with_a_reason() -> None:
    reasons = family_named("gemma3").keep_high
    assert any("vision_tower" in pattern for pattern in reasons)
    assert all(reasons.values())


def test_a_row_per_family() -> None:
    rows = {row["name"]: row for row in describe_models()}
    assert set(rows) == set(load_families())
    assert rows["qwen3"]["default"] == "Qwen/Qwen3-0.6B"
    assert "qwen2.5" in rows["qwen2_5"]["aliases"]
    assert "embedded" in rows["tiny"]["default"]


def test_a_dropped_in_file_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "phi3.yaml").write_text("model_types: [phi3]\naliases: [phi-3]\n")
    monkeypatch.setattr(module, "configs_dir", lambda: tmp_path)
    assert family_named("phi-3").name == "phi3"
    assert family_names() == ["phi-3", "phi3"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_typs: [x]", "model_types"),
        ("aliases: [x]", "needs model_types"),
        ("- x", "mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_faulty_family_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(SwiftFP8Error) as caught:
        load_families(tmp_path)
    assert message in str(caught.value)
    assert "odd.yaml" in str(caught.value)


def test_listing_families_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from swiftfp8.models.family import describe_models; describe_models(); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

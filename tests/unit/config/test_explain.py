"""config explain, diff, list and copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftfp8.config.compose import compose_config, to_yaml
from swiftfp8.config.explain import copy_recipe, diff_configs, explain_key, list_configs
from swiftfp8.config.fields import field_docs
from swiftfp8.errors import SwiftFP8Error


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_key_has_a_help_text() -> None:
    assert [key for key, doc in field_docs().items() if not doc.help] == []


def test_one_key() -> None:
    Path("mine.yaml").write_text("lora_rank: 4\n")
    (item,) = explain_key(compose_config("mine"), "lora_rank")
    assert (item.value, item.origin, item.default) == (4, "mine.yaml:1", 8)
    assert item.type_text == "whole number >= 1"


def test_a_group_and_a_mapping() -> None:
    composed = compose_config(None, ["data.columns.q=instruction"])
    keys = {item.key: item for item in explain_key(composed, "data")}
    assert "data.format" in keys
    assert keys["data.columns"].origin == "command line, data.columns.q=instruction"


def test_an_unknown_key() -> None:
    with pytest.raises(SwiftFP8Error, match="unknown key") as caught:
        explain_key(compose_config(None), "lora_rnk")
    assert caught.value.fix == "did you mean lora_rank?"


def test_diff_of_a_recipe_and_a_run() -> None:
    run = Path("run")
    run.mkdir()
    changed = compose_config("quickstart", ["lora_rank=2"]).config
    (run / "resolved.yaml").write_text(to_yaml(changed))
    assert diff_configs("quickstart", "run") == [("lora_rank", 32, 2)]
    assert diff_configs("run", "run/resolved.yaml") == []


def test_the_list_holds_what_is_packaged() -> None:
    entries = {name: about for group in list_configs().values() for name, about in group}
    assert {"quickstart", "fp8_block", "full", "tiny"} <= set(entries)
    assert all(entries.values()), "each says in a sentence what it is"
    assert entries["simpo"].endswith("without a reference.") and "(Meng et al." in entries["simpo"]
    assert entries["dpo_quickstart"].endswith("the same in capitals.")


def test_copy_never_overwrites(folder: Path) -> None:
    target = copy_recipe("quickstart", None)
    assert target == folder / "quickstart.yaml"
    assert compose_config("quickstart.yaml").config == compose_config("quickstart").config
    target.write_text("lora_rank: 1\n")
    with pytest.raises(SwiftFP8Error, match="exists already"):
        copy_recipe("quickstart", str(folder))
    assert target.read_text() == "lora_rank: 1\n"
    with pytest.raises(SwiftFP8Error, match="unknown recipe"):
        copy_recipe("quikstart", None)

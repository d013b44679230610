"""Shell completion: keys, then values, for shells that cut at `=` and those that don't."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_kit import run_cli

from swiftfp8.config.complete import complete_token


def words(command: str, before: list[str], incomplete: str) -> list[str]:
    return [word for word, _ in complete_token(command, before, incomplete)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_keys_with_their_help() -> None:
    assert complete_token("train", [], "lora_r") == [("lora_rank=", "LoRA r.")]
    assert {"precision.recipe=", "precision.strict="} <= set(words("train", [], "precision."))


def test_a_single_key_offers_its_values() -> None:
    assert words("train", [], "dty") == ["dtype=fp8", "dtype=bf16", "dtype=fp16", "dtype=fp32"]


@pytest.mark.parametrize(
    ("command", "typed", "expected"),
    [
        ("train", "config=quick", ["config=quickstart"]),
        ("train", "dtype=b", ["dtype=bf16"]),
        ("train", "data.shuffle=", ["data.shuffle=true", "data.shuffle=false"]),
        ("train", "model_type=tin", ["model_type=tiny"]),
        ("train", "dataset=quickstart-r", ["dataset=quickstart-reworded"]),
        ("train", "precision=fp8_b", ["precision=fp8_block"]),
        ("train", "tuner=", ["tuner=freeze", "tuner=full", "tuner=lora"]),
        ("plan", "hardware=h2", ["hardware=h200"]),
        ("train", "hardware=h2", []),
        ("export", "export.format=fp8_", ["export.format=fp8_block"]),
        ("infer", "prom", ["prompt="]),
        ("train", "template=fo", ["template=folder/"]),
        ("train", "template=folder/", ["template=folder/x.jinja"]),
    ],
)
def test_values(command: str, typed: str, expected: list[str]) -> None:
    Path("folder").mkdir()
    Path("folder/x.jinja").touch()
    assert words(command, [], typed) == expected


def test_a_shell_that_cuts_at_the_equals_sign() -> None:
    assert words("train", ["config", "="], "quick") == ["quickstart"]
    assert words("train", ["dtype"], "=") == ["fp8", "bf16", "fp16", "fp32"]


def test_bash_gets_its_answer_from_the_command_itself() -> None:
    answer = run_cli(
        env={
            "_SWIFTFP8_COMPLETE": "complete_bash",
            "COMP_WORDS": "swiftfp8\ntrain\nconfig=quickstart\nlora_r",
            "COMP_CWORD": "3",
        }
    )
    assert answer.stdout.split() == ["lora_rank="], answer.stderr

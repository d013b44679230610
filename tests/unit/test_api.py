"""The Python interface hands the pipeline what the command line would."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_kit import REPOSITORY

import swiftfp8
from swiftfp8 import SftArguments, Trainer, pipeline
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.requests import ExportRequest


def arguments(**more: Any) -> SftArguments:
    return SftArguments(
        model_type="tiny",
        dataset="quickstart",
        dtype="fp8",
        lora_rank=64,
        max_steps=1000,
        export_quantization_bit=8,
        **more,
    )


def test_arguments_are_the_configuration() -> None:
    config = arguments(precision={"strict": True}, train="short").config
    assert (config.lora_rank, config.max_steps, config.export_quantization_bit) == (64, 1000, 8)
    assert config.dataset == ("quickstart",)
    assert config.precision.strict and config.train.logging_steps == 1


def test_a_recipe_to_start_from() -> None:
    assert SftArguments(config="quickstart", lora_rank=4).config.max_length == 256
    shown = "SftArguments(config='quickstart', lora_rank=4)"
    assert repr(SftArguments("quickstart", lora_rank=4)) == shown
    assert eval(shown).config == SftArguments("quickstart", lora_rank=4).config


def test_mistakes_are_told_at_once() -> None:
    with pytest.raises(SwiftFP8Error, match="lora_rnk") as caught:
        SftArguments(lora_rnk=8, dtype="fp9")
    assert "did you mean lora_rank?" in str(caught.value) and "fp9" in str(caught.value)
    with pytest.raises(SwiftFP8Error, match="no model"):
        Trainer(SftArguments(dataset="quickstart"))


@pytest.mark.parametrize("recipe", [5, b"quickstart", {"lora_rank": 8}, ["quickstart"]])
def test_a_recipe_is_a_name_or_a_path(recipe: Any) -> None:
    with pytest.raises(SwiftFP8Error, match="a recipe is named by text or a path") as caught:
        SftArguments(recipe)
    assert 'SftArguments("quickstart", lora_rank=16)' in (caught.value.fix or "")
    assert SftArguments(Path("quickstart")).config.max_length == 256


def test_a_value_that_no_file_could_hold_is_told_by_its_key() -> None:
    with pytest.raises(SwiftFP8Error, match="lora_rank") as caught:
        SftArguments(lora_rank=object(), max_length=object())
    assert "give a number, text, a list or a dict" in str(caught.value)
    assert "max_length" in str(caught.value)


def test_an_argument_that_is_changed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def train(composed: Any, **options: Any) -> Any:
        seen.append(composed)
        return SimpleNamespace(run_dir=Path("output/run"))

    monkeypatch.setattr(pipeline, "train", train)
    given = SftArguments(model_type="tiny", dataset="quickstart", max_steps=1)
    trainer = Trainer(given)
    given.lora_rank = 64
    given.max_steps = 2
    given.precision = {"strict": True}
    assert (given.lora_rank, given.max_steps, given.precision.strict) == (64, 2, True)
    assert given.learning_rate == given.config.learning_rate
    assert "lora_rank=64" in repr(given) and "max_steps=2" in repr(given)
    trainer.train()
    (composed,) = seen
    assert (composed.config.lora_rank, composed.config.max_steps) == (64, 2)
    assert "lora_rank=64" in composed.overrides


def test_an_argument_is_checked_when_it_is_changed() -> None:
    given = arguments()
    with pytest.raises(SwiftFP8Error, match="lora_rank must be a whole number, not 'x'"):
        given.lora_rank = "x"
    with pytest.raises(SwiftFP8Error, match="unknown key 'lora_rnk'"):
        given.lora_rnk = 8
    with pytest.raises(AttributeError, match="unknown key 'lora_rnk'"):
        _ = given.lora_rnk
    assert given.lora_rank == 64
    other = copy.deepcopy(given)
    other.lora_rank = 2
    assert (given.lora_rank, other.lora_rank) == (64, 2)


def test_a_trainer_takes_arguments_alone() -> None:
    with pytest.raises(SwiftFP8Error, match="takes SftArguments, not dict"):
        Trainer({"model_type": "tiny"})  # type: ignore[arg-type]


def test_train_then_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def train(composed: Any, **options: Any) -> Any:
        seen.append(composed.config)
        return SimpleNamespace(run_dir=Path("output/run"))

    monkeypatch.setattr(pipeline, "train", train)
    monkeypatch.setattr(pipeline, "export", seen.append)
    target = tmp_path / "a, b"
    trainer = Trainer(arguments(export_dir=target))
    with pytest.raises(SwiftFP8Error, match="nothing to export"):
        trainer.export_model()
    trainer.train()
    trainer.export_model()
    trained, request = seen
    assert trained.export_dir is None  # or training would end with the export itself
    assert request == ExportRequest(
        run="output/run",
        overrides=(
            f"export_dir='{target}'",
            "export_quantization_bit=8",
            "export.format=auto",
        ),
    )


def test_a_plan_that_was_seen_is_not_printed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of other hardware, nor of arguments that were changed since."""
    shown: list[bool] = []

    def train(composed: Any, *, shows_plan: bool) -> Any:
        shown.append(shows_plan)
        return SimpleNamespace(run_dir=Path("output/run"))

    monkeypatch.setattr(pipeline, "train", train)
    monkeypatch.setattr(pipeline, "plan", lambda composed, hardware: None)
    given = SftArguments(model_type="tiny", dataset="quickstart", max_steps=1)
    trainer = Trainer(given)
    trainer.train()
    trainer.plan("h200")
    trainer.train()
    trainer.plan()
    trainer.train()
    given.lora_rank = 64
    trainer.train()
    assert shown == [True, True, False, True]


def test_nothing_is_trained_that_can_not_be_exported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = arguments(export={"exclude": ["nosuch_proj"]})
    for train in (Trainer(given).train, lambda: pipeline.train(given.composed)):
        with pytest.raises(SwiftFP8Error, match="'nosuch_proj' matches no linear"):
            train()
    assert list(tmp_path.iterdir()) == []


def test_plan_is_the_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "plan", lambda composed, hardware: (composed, hardware))
    given = arguments()
    assert Trainer(given).plan("h200") == (given.composed, "h200")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, swiftfp8; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "[]"
    with pytest.raises(AttributeError):
        _ = swiftfp8.nothing

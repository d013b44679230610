"""What the pipeline finds out before it loads anything, and what it says of a run that ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftfp8 import pipeline
from swiftfp8.config.compose import compose_config
from swiftfp8.errors import RunFailed, SwiftFP8Error, SwiftFP8Errors
from swiftfp8.models import load
from swiftfp8.requests import ExportRequest
from swiftfp8.train.checkpoint import write_checkpoint


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("stage", [pipeline.train, pipeline.dry_run])
def test_all_that_is_in_the_way_is_told_at_once_with_its_source(folder: Path, stage: Any) -> None:
    (folder / "out" / "taken").mkdir(parents=True)
    (folder / "out" / "taken" / "thesis.tex").touch()
    Path("mine.yaml").write_text(
        "defaults: [quickstart, _self_]\ntuner: full\nprecision:\n  head: fp8\n"
        "output_dir: out\nrun_name: taken\n"
    )
    tokens = ["train.early_stopping_patience=2", "val_dataset=[]", "report_to=comet"]
    composed = compose_config("mine", tokens)
    with pytest.raises(SwiftFP8Errors) as caught:
        stage(composed)
    places = {problem.what.partition(" ")[0]: problem.where for problem in caught.value.problems}
    assert places == {
        "the": "out/taken",
        "report_to": "command line, report_to=comet",
        "an": "mine.yaml:4 (precision.head=fp8)",
        "early": "command line, train.early_stopping_patience=2",
    }
    assert sorted(path.name for path in folder.rglob("*")) == [
        "mine.yaml",
        "out",
        "taken",
        "thesis.tex",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["train.tokens_per_step=900000"],
            r"that is more than the [\d,]+ of all rows.*give 1 step",
        ),
        (["per_device_train_batch_size=8"], "6 rows, 1 time.s. in steps of 8 x 1 rows, give 1 st"),
        (["per_device_train_batch_size=2"], None),
        (["train.tokens_per_step=90", "per_device_train_batch_size=1"], None),
    ],
)
def test_a_dry_run_warns_of_rows_that_give_one_step_of_rate_0(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str | None
) -> None:
    row = {"instruction": "what is it?", "output": "an answer of some words"}
    Path("rows.jsonl").write_text(6 * f"{json.dumps(row)}\n")
    recipe = ["dataset=[rows.jsonl]", "val_dataset=[]", "max_steps=-1", "num_train_epochs=1"]
    options = [*recipe, "split_dataset_ratio=0", "gradient_accumulation_steps=1", *options]
    pipeline.dry_run(compose_config("quickstart", options))
    shown = " ".join(capsys.readouterr().out.split())
    if said is None:
        assert "warm-up" not in shown
    else:
        assert re.search(f"{said}.*learning rate 0: nothing is learnt", shown)


def test_flash_attention_that_is_not_installed_is_told_by_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    load.require_attention("sdpa")
    with pytest.raises(SwiftFP8Error) as caught:
        load.require_attention("flash_attention_2")
    assert caught.value.where == "attn_implementation=flash_attention_2"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunFailed("no room")])
def test_an_export_that_does_not_end_well_leaves_the_command_that_makes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    result = SimpleNamespace(run_dir=Path("output/r"), interrupted=False)
    monkeypatch.setattr(pipeline, "_train", lambda *_, **__: result)
    monkeypatch.setattr(pipeline, "export", fail)
    with pytest.raises(type(error)):
        pipeline.train(compose_config("quickstart", ["export_quantization_bit=8"]))
    said = capsys.readouterr().err
    assert said == "training is done, its export is not: swiftfp8 export run=output/r\n"


@pytest.mark.parametrize(("interrupted", "saves"), [(False, True), (True, True), (False, False)])
def test_a_run_that_ends_without_an_export_says_what_comes_next(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupted: bool,
    saves: bool,
) -> None:
    result = SimpleNamespace(run_dir=Path("output/my run"), interrupted=interrupted)
    monkeypatch.setattr(pipeline, "_train", lambda *_, **__: result)
    pipeline.train(compose_config("quickstart", []), saves=saves)
    said = (
        "trained: output/my run\n"
        "ask it:    swiftfp8 infer 'run=output/my run'\n"
        "export it: swiftfp8 export 'run=output/my run'\n"
    )
    assert capsys.readouterr().out == ("" if interrupted or not saves else said)


def test_a_second_ctrl_c_leaves_the_command_that_resumes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> str:
        with pytest.raises(KeyboardInterrupt), pipeline._kept_once_begun(folder):
            raise KeyboardInterrupt
        return capsys.readouterr().err

    (folder / "logging.jsonl").touch()
    assert interrupted() == ""
    write_checkpoint(folder, 5, lambda part: (part / "x").touch(), {})
    assert f"resume_from_checkpoint={folder}" in interrupted()


@pytest.mark.parametrize("told", ["export.format=fp8_block", "export_quantization_bit=8"])
def test_a_merge_in_another_format_is_refused(tmp_path: Path, told: str) -> None:
    request = ExportRequest(model=str(tmp_path), overrides=(told, f"export_dir={tmp_path / 'out'}"))
    with pytest.raises(SwiftFP8Error, match="merge writes BF16") as caught:
        pipeline.merge(request)
    assert "swiftfp8 export" in str(caught.value.fix)

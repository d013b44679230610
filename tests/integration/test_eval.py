"""`swiftfp8 eval`: what was learned by heart is answered, and what was not is told apart."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from task_kit import SOUNDS, run_task, write_decoder, write_rows

from swiftfp8 import pipeline
from swiftfp8.config.compose import read_resolved
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.evaluate import evaluate
from swiftfp8.export.locate import locate_run
from swiftfp8.infer import Sampling
from swiftfp8.requests import EvalRequest
from swiftfp8.train.metrics import read_log

SHORT = Sampling(max_new_tokens=24)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class Stale(SwiftFP8Error):
    """A mistake of a kind of its own."""


def row(word: str, sound: str) -> dict:
    return {"instruction": f"What does the {word} say?" + " please" * len(word), "output": sound}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A tiny model that knows six animals' sounds by heart."""
    folder = tmp_path_factory.mktemp("eval")
    torch.set_num_threads(1)
    rows = [row(word, f"It says {sound}.") for word, sound in SOUNDS.items()]
    write_rows(folder / "sounds.jsonl", rows * 4)
    write_rows(folder / "sounds-held.jsonl", rows)
    result, _ = run_task(
        folder, write_decoder(folder / "model"), "sounds", dtype="fp32", tuner="full",
        max_steps=60, learning_rate=0.003, train={"eval_steps": 0, "save_steps": 0},
    )  # fmt: skip
    return result.run_dir


def ask(**values: object):
    shown = io.StringIO()
    request = EvalRequest(max_new_tokens=24, **values)  # type: ignore[arg-type]
    return pipeline.evaluate(request, console=Console(file=shown, width=120)), shown.getvalue()


def test_a_run_answers_its_own_evaluation_rows(run, tmp_path):
    found, shown = ask(run=str(run), out=str(tmp_path / "found.json"))
    assert found.rows == 6 and found.left_out == 0
    assert found.metrics["exact_match"] == found.metrics["rougeL"] == 1.0, shown
    last = [line for line in read_log(run) if "eval_loss" in line][-1]
    assert found.loss == pytest.approx(last["eval_loss"], rel=0.02)  # it runs in BF16 here
    assert "6 evaluation rows" in shown and "It says" in shown
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["metrics"] == found.metrics and len(written["answers"]) == 6
    assert "What does the cat say?" in written["answers"][0]["prompt"]


@pytest.mark.parametrize(
    "options",
    [
        {"data": {"loss_scale": "all"}},
        {"data": {"loss_weights": {"assistant": 2.0}}},
        {"export": {"calibrate": True}},
    ],
)
def test_a_run_that_was_trained_on_more_than_answers_is_asked_alike(run, tmp_path, options):
    composed = read_resolved(run)
    ((part, changes),) = options.items()
    if "calibrate" in changes:
        changes = {**changes, "calibration_dataset": composed.val_dataset}
    changed = replace(composed, **{part: replace(getattr(composed, part), **changes)})
    found = evaluate(changed, *locate_run(run), limit=2, sampling=SHORT)
    assert found.rows == 2 and found.metrics["exact_match"] == 1.0
    assert found.answers[0].wanted.startswith("It says")


def test_answers_do_not_depend_on_the_batch(run):
    alone, _ = ask(run=str(run), batch_size=1, limit=3)
    together, _ = ask(run=str(run), batch_size=3, limit=3)
    assert [one.answer for one in alone.answers] == [one.answer for one in together.answers]
    assert len({len(one.prompt) for one in alone.answers}) > 1  # some were padded


def test_other_rows_and_the_model_before_training(run, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [row("cat", "It says no.")])
    wrong, _ = ask(run=str(run), dataset=str(rows))
    assert wrong.metrics["exact_match"] == 0.0 and wrong.metrics["rouge1"] > 0.5
    before, _ = ask(model=str(run.parent / "model"), dataset=str(rows))
    assert before.metrics["rougeL"] < 0.5 and before.loss > 3


def test_what_can_not_be_asked_says_why(run, tmp_path):
    plain = write_rows(tmp_path / "plain.jsonl", [{"text": "Only words."}])
    with pytest.raises(SwiftFP8Error, match="none of 1 rows has a question"):
        ask(run=str(run), dataset=str(plain))
    with pytest.raises(SwiftFP8Error, match="no rows are known"):
        ask(model=str(run.parent / "model"))
    with pytest.raises(SwiftFP8Error, match="the model has 256 positions"):
        evaluate(read_resolved(run), *locate_run(run))


def test_advice_names_what_eval_takes(run, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"instruction": "q", "output": "a"}\n{\n')
    strange = write_rows(tmp_path / "strange.jsonl", [{"a": 1}])
    wide = tmp_path / "wide.jsonl"
    wide.write_text('{"instruction": "q", "output": "a"}\n', encoding="utf-16")
    for path in (broken, strange):
        with pytest.raises(SwiftFP8Error) as caught:
            ask(run=str(run), dataset=str(path))
        assert caught.value.fix == "correct the rows, or name others: dataset=<rows>"
        assert str(path) in caught.value.where
    with pytest.raises(SwiftFP8Error, match="not UTF-8") as caught:
        ask(run=str(run), dataset=str(wide))
    assert "iconv" in caught.value.fix, "what helps here too is left as it is"


def test_a_model_without_a_chat_template_is_told_as_in_a_chat(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(run.parent / "model", model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(SwiftFP8Error, match="no chat template") as caught:
        ask(model=str(model), dataset="quickstart")
    assert "put the model's chat_template.jinja there" in caught.value.fix


@pytest.mark.parametrize(
    ("fix", "told"),
    [
        ("raise max_length, or correct the rows", True),
        ("leave them out with data.on_bad_row=skip", True),
        ("task=sft reads: text", True),
        ("change the template (template=FILE), so that a line break stands between", False),
        ("ask your system for more room: packing this task is all it can do", False),
    ],
)
def test_advice_is_changed_where_it_names_a_recipes_options(monkeypatch, run, fix, told):
    def fail(*_):
        raise problem

    monkeypatch.setattr("swiftfp8.export.run_rows.read_run_rows", fail)
    for problem in (SwiftFP8Error("wrong", fix=fix), Stale("wrong", fix=fix)):
        with pytest.raises(type(problem)) as caught:
            ask(run=str(run))
        assert (caught.value.fix == fix) == (not told)
    problem = RunFailed("no memory left", fix=fix)
    with pytest.raises(RunFailed) as caught:
        ask(run=str(run))
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("option", "value"), [("limit", -1), ("batch_size", 0), ("top_p", 0.0), ("top_p", 1.5)]
)
def test_a_number_out_of_range_is_told_by_its_name(run, option, value):
    with pytest.raises(SwiftFP8Error, match=f"^{option} must") as caught:
        ask(run=str(run), **{option: value})
    assert caught.value.where == option


def test_a_classifier_has_metrics_of_its_own(tmp_path):
    brief = {"dtype": "fp32", "max_steps": 1, "train": {"save_steps": 0}}
    result, _ = run_task(
        tmp_path, write_decoder(tmp_path / "model"), "label", task="seq_cls", **brief
    )
    with pytest.raises(SwiftFP8Error, match="task=seq_cls trained puts out no words"):
        ask(run=str(result.run_dir))


@pytest.mark.parametrize(
    ("name", "why"), [("folder", "is a folder"), ("file/x.json", "can't write")]
)
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path, name, why):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SwiftFP8Error, match=why) as caught:
        ask(model="no such model", out=str(tmp_path / name))
    assert caught.value.where == f"out={tmp_path / name}"

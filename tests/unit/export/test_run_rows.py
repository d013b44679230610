"""Rows that judge an export: evaluation rows, else training rows, never those that calibrated."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from swiftfp8.config.paths import assets_dir
from swiftfp8.config.schema import Config, ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate_stage import read_calibration_rows
from swiftfp8.export.judge import Row
from swiftfp8.export.run_rows import read_run_rows, take_rows
from swiftfp8.models.family import family_named

CALIBRATED = ExportConfig(calibrate=True)


def model() -> Path:
    return assets_dir() / str(family_named("tiny").embedded)


def read(**options):
    return read_run_rows(Config(max_length=256, **options), model(), None)


def test_evaluation_rows_come_first() -> None:
    found = read(dataset=["quickstart"], val_dataset=["quickstart-reworded"])
    assert (found.kind, len(found.rows), found.missing) == ("evaluation", 42, None)
    row = found.rows[0]
    assert row.ids_T.shape == row.labels_T.shape
    trained = row.labels_T != -100
    assert 0 < trained.sum() < len(trained)  # the answer, not the question
    assert torch.equal(row.labels_T[trained], row.ids_T[trained])


def test_a_share_set_aside_is_the_one_of_the_run() -> None:
    found = read(dataset=["quickstart#40"], split_dataset_ratio=0.1)
    assert (found.kind, len(found.rows)) == ("evaluation", 4)


def test_without_evaluation_rows_some_training_rows_judge() -> None:
    found = read(dataset=["quickstart"])
    assert (found.kind, len(found.rows)) == ("training", 256)
    assert len(read(dataset=["quickstart#9"]).rows) == 9


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": ["quickstart"]},
        {"dataset": ["quickstart"], "val_dataset": ["quickstart#20"]},
    ],
)
def test_rows_that_chose_the_rounding_do_not_judge_it(options) -> None:
    found = read(**options, export=CALIBRATED)
    assert not found.rows and "chose the rounding" in str(found.missing)
    other = ExportConfig(calibrate=True, calibration_dataset=["quickstart-unseen"])
    assert read(**options, export=other).rows


@pytest.mark.parametrize("name", ["{folder}/rows.jsonl", "rows.jsonl#5", "quickstart-unseen#9"])
@pytest.mark.parametrize("place", ["val_dataset", "split", "dataset"])
def test_rows_that_are_named_to_choose_the_rounding_do_not_judge_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"instruction": f"{k} + 1?", "output": str(k + 1)}) for k in range(20)]
    Path("rows.jsonl").write_text("\n".join(lines))
    run: dict[str, object] = {"dataset": ["rows.jsonl", "quickstart-unseen"]}
    if place == "val_dataset":
        run = {"dataset": ["quickstart"], "val_dataset": run["dataset"]}
    elif place == "split":
        run["split_dataset_ratio"] = 0.1
    for names, judges in (([name.format(folder=tmp_path)], False), (["quickstart-reworded"], True)):
        export = ExportConfig(calibrate=True, calibration_dataset=names)
        found = read(**run, export=export)
        assert bool(found.rows) == judges
        assert ("chose the rounding" in str(found.missing)) == (not judges)


def test_evaluation_rows_judge_a_calibrated_export() -> None:
    found = read(dataset=["quickstart"], val_dataset=["quickstart-reworded"], export=CALIBRATED)
    assert found.rows


def test_rows_that_a_split_set_aside_judge_and_do_not_calibrate() -> None:
    run = {"dataset": ["quickstart#40"], "split_dataset_ratio": 0.1, "export": CALIBRATED}
    judging = [row.ids_T.tolist() for row in read(**run).rows]
    chosen = read_calibration_rows(Config(max_length=256, **run), model(), None).rows
    assert (len(judging), len(chosen)) == (4, 36)
    assert not any(ids in chosen for ids in judging)
    held = {**run, "val_dataset": ["quickstart-reworded"], "split_dataset_ratio": 0.0}
    assert len(read_calibration_rows(Config(max_length=256, **held), model(), None).rows) == 40


@pytest.mark.parametrize("task", ["seq_cls", "reward", "embedding"])
def test_rows_of_other_tasks_have_no_loss_over_words(task: str) -> None:
    assert task in str(read(dataset=["quickstart"], task=task).missing)


def rated(file: Path, desired: int, others: int) -> str:
    """A file of ratings with so many desired answers, which say yes, and others, which say no."""
    ratings = [True] * desired + [False] * others
    rows = [
        {"prompt": f"{k} + 1?", "completion": "yes" if good else "no", "label": good}
        for k, good in enumerate(ratings)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def test_chosen_answers_are_what_a_dpo_run_is_judged_and_calibrated_on() -> None:
    run = {"task": "dpo", "dataset": ["quickstart-preferences#20"], "split_dataset_ratio": 0.2}
    found = read(**run, export=CALIBRATED)
    assert (found.kind, len(found.rows)) == ("evaluation", 4)
    for row in found.rows:
        trained = row.labels_T != -100
        assert 0 < trained.sum() < len(trained)
        assert torch.equal(row.labels_T[trained], row.ids_T[trained])
    tokenizer = AutoTokenizer.from_pretrained(model())
    said = [tokenizer.decode(row.ids_T[row.labels_T != -100]) for row in found.rows]
    assert not any(answer.isupper() for answer in said)  # the rejected ones shout
    chosen = read_calibration_rows(Config(max_length=256, **run), model(), None).rows
    assert len(chosen) == 16
    assert not any(row.ids_T.tolist() in chosen for row in found.rows)


def test_desired_answers_are_what_a_kto_run_is_judged_on(tmp_path: Path) -> None:
    run = {"task": "dpo", "rlhf": {"loss_type": "kto"}}
    found = read(**run, dataset=[rated(tmp_path / "some.jsonl", 3, 5)])
    assert (found.kind, len(found.rows)) == ("training", 3)
    found = read(**run, dataset=[rated(tmp_path / "none.jsonl", 0, 5)])
    assert not found.rows and "desired answer" in str(found.missing)


def test_no_rows_have_a_reason_and_bad_ones_an_error(tmp_path: Path) -> None:
    assert "no rows are known" in str(read().missing)
    with pytest.raises(SwiftFP8Error):
        read(dataset=[str(tmp_path / "gone.jsonl")])


def test_rows_are_spread_and_one_is_left_at_least() -> None:
    rows = [Row(ids_T=torch.full((10,), n), labels_T=torch.full((10,), n)) for n in range(10)]
    assert [int(row.ids_T[0]) for row in take_rows(rows, 30)] == [0, 3, 6]
    assert len(take_rows(rows, 1000)) == 10
    assert len(take_rows(rows, 1)) == 1


def test_a_streams_first_rows_are_its_evaluation_rows_where_they_were_set_aside() -> None:
    stream = {"dataset": ["quickstart"], "max_steps": 5}
    found = read(**stream, data={"streaming": True, "eval_rows": 7})
    assert (found.kind, len(found.rows)) == ("evaluation", 7)
    found = read(**stream, data={"streaming": True})
    assert (found.kind, len(found.rows)) == ("training", 288)
    held = {"streaming": True, "eval_rows": 7}
    found = read(**stream, data=held, export=CALIBRATED)
    assert found.missing is not None
    found = read(**stream, data={"streaming": True}, val_dataset=["quickstart-reworded"])
    assert (found.kind, len(found.rows)) == ("evaluation", 42)

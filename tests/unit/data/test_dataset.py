import json
import logging

import pytest
import torch

from swiftfp8.config.schema import Config
from swiftfp8.data.collator import Collator
from swiftfp8.data.dataset import check_rows, load_datasets
from swiftfp8.data.lengths import MASKED
from swiftfp8.errors import SwiftFP8Error

GOOD = {"instruction": "q", "output": "a"}


@pytest.fixture
def write(tmp_path):
    def write_rows(name, rows):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        return str(path)

    return write_rows


def load(tokenizer, multiple=1, **config):
    return load_datasets(Config(**config), tokenizer, multiple)


def test_quickstart_loads_and_reports(tokenizer):
    data = load(tokenizer, dataset="quickstart", val_dataset="quickstart-reworded", max_length=256)
    report = data.report
    assert 250 <= report.train.rows == len(data.train) == report.train.sources[0].rows
    assert not report.train.skipped and not report.train.dropped and not report.train.truncated
    assert report.train.tokens == sum(len(row["input_ids"]) for row in data.train)
    trained = sum(label != MASKED for row in data.train for label in row["labels"])
    assert report.train.masked_share == pytest.approx(1 - trained / report.train.tokens)
    text = "\n".join(report.summary_lines())
    assert "quickstart: 288 rows, format messages" in text and "eval (val_dataset)" in text


def test_several_datasets_of_several_formats(tokenizer, write):
    texts = write("b.jsonl", [{"text": "words"}])
    data = load(tokenizer, dataset=[write("a.jsonl", [GOOD]), texts, "quickstart#3"])
    assert [source.format for source in data.report.train.sources] == ["alpaca", "text", "messages"]
    assert len(data.train) == 5


def test_all_bad_rows_come_in_one_error_with_their_lines(tokenizer, write):
    bad = [GOOD, '{"instruction": ', {"instruction": "q", "output": ""}] + [{"output": 1}] * 20
    path = write("a.jsonl", bad)
    with pytest.raises(SwiftFP8Error) as caught:
        load(tokenizer, dataset=path)
    text = str(caught.value)
    assert "22 bad rows of 23" in text and "... and 12 more" in text
    assert text.count(f"  {path}:") == 10
    assert f"{path}:2: malformed JSON" in text and f"{path}:3: no answer" in text
    assert "data.on_bad_row=skip" in text


def test_bad_rows_of_every_kind_are_told_in_the_order_of_their_lines(tokenizer, write):
    empty = {"instruction": "q", "output": ""}
    first = write("b.jsonl", [GOOD, empty, "{", empty, "{"])
    second = write("a.jsonl", [empty, GOOD, "{"])
    with pytest.raises(SwiftFP8Error) as caught:
        load(tokenizer, dataset=[first, second])
    told = [line.strip().partition(": ")[0] for line in str(caught.value).splitlines()[1:6]]
    assert told == [f"{first}:{n}" for n in (2, 3, 4, 5)] + [f"{second}:1"]
    assert caught.value.where == f"{first}:2"


def test_skipped_bad_rows_are_counted_by_reason_with_one_warning(tokenizer, write, caplog):
    rows = [GOOD, {"instruction": "q", "output": ""}, "{", {"instruction": "q", "output": " "}]
    path = write("a.jsonl", rows)
    with caplog.at_level(logging.WARNING, logger="swiftfp8"):
        data = load(tokenizer, dataset=path, data={"on_bad_row": "skip"})
    assert len(data.train) == 1
    assert data.report.train.skipped == {"no answer": 2, "malformed JSON": 1}
    assert len(caplog.records) == 1
    assert "skipped 3 bad rows of 4" in caplog.text
    assert f"the first: {path}:2\n" in caplog.text


def test_a_file_of_bad_rows_only_is_an_error_even_when_skipped(tokenizer, write):
    path = write("a.jsonl", ["{", "}"])
    with pytest.raises(SwiftFP8Error, match="no row is left"):
        load(tokenizer, dataset=path, data={"on_bad_row": "skip"})


def test_rows_without_room_for_an_answer_are_dropped_with_their_reason(tokenizer, write):
    path = write("a.jsonl", [GOOD, {"instruction": "word " * 99, "output": "a"}])
    data = load(tokenizer, dataset=path, max_length=64)
    assert len(data.train) == 1
    assert list(data.report.train.dropped.values()) == [1]
    with pytest.raises(SwiftFP8Error, match="no row is left"):
        load(tokenizer, dataset=path, max_length=4)


def test_problems_of_all_entries_come_together(tokenizer, tmp_path):
    with pytest.raises(SwiftFP8Error) as caught:
        load(tokenizer, dataset=["quikstart", str(tmp_path / "no.jsonl")])
    assert "quikstart" in str(caught.value) and "no.jsonl" in str(caught.value)


def test_rows_are_checked_without_tokenizing(write):
    path = write("a.jsonl", [GOOD, "{", {"instruction": "q", "output": ""}])
    with pytest.raises(SwiftFP8Error, match=f"2 bad rows of 3(?s:.*){path}:2: malformed"):
        check_rows(Config(dataset=path))
    skipping = Config(
        dataset=[path, "owner/name"], val_dataset="quickstart", data={"on_bad_row": "skip"}
    )
    found = check_rows(skipping)
    assert found.train_rows is None, "not all entries were read"
    lines = found.lines
    assert lines[0] == "dataset: 1 rows can be used, of 3"
    assert lines[1].startswith(f"  {path}: 3 rows, format alpaca")
    assert "dataset: 'owner/name' lies on a hub, it was not read" in lines
    assert "val_dataset: 288 rows can be used, of 288" in lines
    assert "not tokenized" in lines[-1]


@pytest.mark.parametrize("by", ["split", "val_dataset"])
def test_evaluation_rows_that_are_training_rows_too_are_counted(tokenizer, write, by):
    rows = [{"instruction": f"q{n % 10}", "output": "a"} for n in range(60)]
    options = {"dataset": write("a.jsonl", rows), "split_dataset_ratio": 0.2}
    if by == "val_dataset":
        new = {"instruction": "new", "output": "a"}
        options = {**options, "val_dataset": write("b.jsonl", [rows[3], new])}
    said = {
        "split": "warning: 12 evaluation rows are training rows too",
        "val_dataset": "warning: 1 evaluation row is a training row too",
    }[by]
    assert said in "\n".join(load(tokenizer, **options).report.summary_lines())
    assert said in "\n".join(check_rows(Config(**options)).lines)
    apart = {**options, "dataset": write("c.jsonl", [GOOD, {"instruction": "p", "output": "a"}])}
    assert "warning" not in "\n".join(load(tokenizer, **apart).report.summary_lines())
    assert "warning" not in "\n".join(check_rows(Config(**apart)).lines)


def test_nothing_to_train_on(tokenizer):
    with pytest.raises(SwiftFP8Error, match="nothing to train on"):
        load(tokenizer, dataset=[])


def test_split_is_seeded_disjoint_and_complete(tokenizer):
    def parts(seed):
        data = load(tokenizer, dataset="quickstart", split_dataset_ratio=0.1, seed=seed)
        return [[tuple(row["input_ids"]) for row in part] for part in (data.train, data.eval)]

    train, held = parts(1)
    assert len(held) == 29 and len(train) == 259 and not set(train) & set(held)
    assert parts(1) == [train, held]
    assert parts(2) != [train, held]


def test_split_of_one_row_is_an_error(tokenizer, write):
    with pytest.raises(SwiftFP8Error, match="can't be split"):
        load(tokenizer, dataset=write("a.jsonl", [GOOD]), split_dataset_ratio=0.5)


def test_columns_and_format_can_be_given(tokenizer, write):
    path = write("a.jsonl", [{"frage": "q", "antwort": "a", "text": "t"}])
    columns = {"frage": "instruction", "antwort": "output"}
    data = load(tokenizer, dataset=path, data={"columns": columns})
    assert data.report.train.sources[0].format == "alpaca"
    data = load(tokenizer, dataset=path, data={"format": "text"})
    assert data.report.train.sources[0].reason == "asked for"
    with pytest.raises(SwiftFP8Error, match="lacks the column 'farge'"):
        load(tokenizer, dataset=path, data={"columns": {"farge": "instruction"}})


def test_pretrain_learns_every_token(tokenizer):
    for options in ({"task": "pretrain"}, {"data": {"loss_scale": "all"}}):
        data = load(tokenizer, dataset="quickstart#5", **options)
        assert data.report.train.masked_share == 0.0


@pytest.mark.parametrize("multiple", [1, 8, 128])
def test_collator_pads_right_to_a_multiple_and_masks_padding(multiple):
    rows = [
        {"input_ids": [5, 6, 7], "labels": [MASKED, 6, 7]},
        {"input_ids": list(range(9)), "labels": list(range(9))},
    ]
    batch = Collator(pad_id=1, token_multiple=multiple)(rows)
    length = -(-9 // multiple) * multiple
    assert batch.pop("num_tokens") == 12
    assert set(batch) == {"input_ids", "labels"}
    assert {tensor.shape for tensor in batch.values()} == {(2, length)}
    assert all(str(tensor.dtype) == "torch.int64" for tensor in batch.values())
    assert batch["input_ids"][0, :3].tolist() == [5, 6, 7]
    assert batch["labels"][0, :3].tolist() == [MASKED, 6, 7]
    padded = torch.arange(length) >= torch.tensor([[3], [9]])
    assert (batch["input_ids"][padded] == 1).all() and (batch["labels"][padded] == MASKED).all()


def test_trainer_accepts_rows_and_collator(tokenizer):
    from torch.utils.data import DataLoader

    data = load(tokenizer, multiple=8, dataset="quickstart", max_length=256)
    seen = 0
    for batch in DataLoader(data.train, batch_size=50, shuffle=True, collate_fn=data.collator):
        assert batch["input_ids"].shape[1] % 8 == 0
        seen += len(batch["input_ids"])
    assert seen == len(data.train)

import io
import json

import numpy as np
import pytest
from rich.console import Console

from swiftfp8.config.schema import Config
from swiftfp8.data.dataset import load_datasets
from swiftfp8.data.inspect import inspect_datasets
from swiftfp8.data.lengths import MASKED
from swiftfp8.report.data_view import print_inspection


def rows(count):
    return [
        {"instruction": f"question {k}", "output": "word " * (1 + k % 40) + "."}
        for k in range(count)
    ]


@pytest.fixture
def write(tmp_path):
    def write_rows(name, lines):
        path = tmp_path / name
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_rows


def inspect(tokenizer, sample=0, show=1, **options):
    return inspect_datasets(Config(**options), tokenizer, sample=sample, show=show)


def printed(found, *, terminal=False, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_inspection(found, Console(file=file, width=100, force_terminal=terminal))
    file.seek(0)
    return file.read()


def test_figures_are_those_of_loading(tokenizer, write):
    path = write("a.jsonl", rows(120))
    part = inspect(tokenizer, dataset=path, max_length=40).train
    loaded = load_datasets(Config(dataset=path, max_length=40), tokenizer, 1)
    report = loaded.report.train
    assert part.sources == report.sources and part.rows == part.sampled == 120
    assert np.minimum(part.lengths, 40).sum() == report.tokens
    assert part.fitted.truncated == report.truncated == (part.lengths > 40).sum() > 0
    assert part.truncated_share == report.truncated / 120


def test_shown_rows_are_the_tokens_and_the_mask(tokenizer, write):
    path = write("a.jsonl", rows(9))
    part = inspect(tokenizer, dataset=path, show=3, max_length=200).train
    assert [row.where for row in part.shown] == [f"{path}:1", f"{path}:4", f"{path}:7"]
    loaded = load_datasets(Config(dataset=path, max_length=200), tokenizer, 1).train
    for index, row in zip((0, 3, 6), part.shown, strict=True):
        tokens = loaded[index]
        assert "".join(run.text for run in row.runs) == tokenizer.decode(tokens["input_ids"])
        trained = [label for label in tokens["labels"] if label != MASKED]
        assert "".join(run.text for run in row.runs if run.trained) == tokenizer.decode(trained)
        assert (row.tokens, row.trained, row.cut) == (len(tokens["labels"]), len(trained), 0)


def test_bad_rows_duplicates_and_leaks_are_found_not_raised(tokenizer, write):
    train = write("a.jsonl", [*rows(5), "{", {"instruction": "q", "output": ""}, rows(5)[2]])
    held = write("b.jsonl", [rows(5)[1], {"instruction": "new", "output": "a"}])
    found = inspect(tokenizer, dataset=train, val_dataset=held)
    part = found.train
    assert (part.rows, part.total, len(part.bad), part.duplicates) == (6, 8, 2, 1)
    assert part.pairs == ((f"{train}:8", f"{train}:3"),)
    assert found.leaked == 1 and found.eval.duplicates == 0
    text = printed(found)
    assert "bad rows: 2 (1 x malformed JSON, 1 x no answer)" in text
    assert f"  {train}:6: malformed JSON" in text
    assert f"  {train}:8 repeats {train}:3" in text
    assert "exact duplicates: 1 rows (16.7%)" in text
    assert "1 of 2 evaluation rows are training rows too" in text


def test_rows_set_aside_that_are_training_rows_too_are_counted(tokenizer, write):
    ten = [{"instruction": f"q{n % 10}", "output": "a"} for n in range(60)]
    found = inspect(tokenizer, dataset=write("a.jsonl", ten), split_dataset_ratio=0.2)
    assert (found.leaked, found.held, found.eval) == (12, 12, None)
    said = "12 of 12 evaluation rows that split_dataset_ratio sets aside are training rows too"
    assert said in printed(found)
    found = inspect(tokenizer, dataset=write("b.jsonl", rows(5)), split_dataset_ratio=0.2)
    assert (found.leaked, found.held) == (0, 1)
    found = inspect(tokenizer, dataset=write("c.jsonl", ["{"]), split_dataset_ratio=0.2)
    assert (found.held, len(found.train.bad)) == (0, 1)


def test_a_sample_says_so_and_depends_on_the_seed(tokenizer, write):
    path = write("a.jsonl", rows(200))
    one, same, other = (
        inspect(tokenizer, sample=50, dataset=path, seed=seed).train for seed in (1, 1, 2)
    )
    assert one.sampled == len(one.lengths) == 50 and one.rows == 200
    assert (one.lengths == same.lengths).all() and (one.lengths != other.lengths).any()
    assert "lengths in tokens, from 50 rows drawn by seed:" in printed(
        inspect(tokenizer, sample=50, dataset=path)
    )
    assert "from all rows:" in printed(inspect(tokenizer, dataset=path))


def test_masks_are_marked_by_style_on_a_terminal_and_by_brackets_elsewhere(tokenizer, write):
    found = inspect(tokenizer, dataset=write("a.jsonl", [{"instruction": "q", "output": "a"}]))
    assert "⟦a<|im_end|>⟧" in printed(found)
    assert "[[a<|im_end|>]]" in printed(found, encoding="ascii")
    styled = printed(found, terminal=True)
    assert "\x1b[1;32ma<|im_end|>\x1b[0m" in styled and "⟦" not in styled


def test_a_row_over_max_length_shows_where_it_is_cut(tokenizer, write):
    path = write("a.jsonl", [{"instruction": "q", "output": "word " * 100}])
    part = inspect(tokenizer, dataset=path, max_length=30).train
    (row,) = part.shown
    assert row.cut == row.tokens - 30 > 0
    assert f"--- cut: {row.cut} tokens over max_length" in printed(
        inspect(tokenizer, dataset=path, max_length=30)
    )


@pytest.mark.parametrize(
    ("task", "row", "sequences", "shown"),
    [
        ("dpo", {"prompt": "q", "chosen": "yes", "rejected": "no"}, 2, "yes"),
        ("reward", {"prompt": "q", "chosen": "yes", "rejected": "no"}, 2, "yes"),
        ("seq_cls", {"text": "some words", "label": "a"}, 1, "some words"),
        ("embedding", {"anchor": "q", "positive": "yes", "negative": "no"}, 3, "q"),
    ],
)
def test_rows_of_other_tasks_are_shown_too(tokenizer, tmp_path, task, row, sequences, shown):
    path = tmp_path / "rows.jsonl"
    rows = [row, {**row, "label": "b"}] if task == "seq_cls" else [row]
    path.write_text("\n".join(json.dumps(one) for one in rows))
    found = inspect_datasets(Config(task=task, dataset=str(path)), tokenizer, sample=0, show=1)
    assert len(found.train.lengths) == sequences * len(rows)
    trained = [run.text for run in found.train.shown[0].runs if run.trained]
    assert trained[0].startswith(shown)


def test_weights_stand_before_the_text_that_has_them(tokenizer, write):
    row = {"instruction": "q", "output": "<think>why</think>because"}
    data = {"loss_weights": {"reasoning": 0.5}}
    found = inspect(tokenizer, dataset=write("a.jsonl", [row]), data=data)
    runs = [(run.text, run.weight) for run in found.train.shown[0].runs if run.trained]
    assert runs == [("<think>why</think>", 0.5), ("because<|im_end|>", 1.0)]
    assert "⟦x0.5 <think>why</think>⟧⟦because<|im_end|>⟧" in printed(found)
    assert "[[x0.5 <think>why</think>]]" in printed(found, encoding="ascii")

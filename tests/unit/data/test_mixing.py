import json
from collections import Counter

import pytest

from swiftfp8.config.fields import field_docs
from swiftfp8.config.schema import Config
from swiftfp8.data.chat import Example
from swiftfp8.data.dataset import check_rows, load_datasets
from swiftfp8.data.mixing import mix
from swiftfp8.errors import SwiftFP8Error


def examples(*sizes):
    return [
        Example(content=f"{entry}:{k}", where="", entry=entry)
        for entry, size in enumerate(sizes)
        for k in range(size)
    ]


def count(mixed):
    return Counter(example.entry for example in mixed)


def test_shares_are_kept_until_the_first_or_the_last_entry_is_used_up():
    rows = examples(3_000, 9_000)
    first = mix(rows, ["a", "b"], [1, 1], "first_exhausted", 3)
    assert count(first)[0] == 3_000 and abs(count(first)[1] - 3_000) < 300
    assert len({example.content for example in first}) == len(first)
    last = mix(rows, ["a", "b"], [0.25, 0.25], "all_exhausted", 3)
    assert {example.content for example in last} == {example.content for example in rows}
    assert count(last)[1] == 9_000 and abs(count(last)[0] - 9_000) < 500
    assert mix(rows, ["a", "b"], [1, 1], "first_exhausted", 3) == first
    assert mix(rows, ["a", "b"], [1, 1], "first_exhausted", 4) != first


def test_what_can_not_be_mixed_is_named():
    with pytest.raises(SwiftFP8Error, match="'b' has no row"):
        mix(examples(5), ["a", "b"], [1, 1], "first_exhausted", 0)
    with pytest.raises(SwiftFP8Error, match="uses up the 100 rows of 'b'"):
        mix(examples(5, 100), ["a", "b"], [1, 1e-7], "all_exhausted", 0)


@pytest.fixture
def files(tmp_path):
    made = []
    for name, size in (("a", 10), ("b", 100)):
        path = tmp_path / f"{name}.jsonl"
        lines = [{"instruction": f"{name} {k}", "output": f"said {k}"} for k in range(size)]
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        made.append(str(path))
    return made


def test_training_rows_are_mixed_after_evaluation_rows_are_set_aside(files, tokenizer):
    data = {"interleave_prob": [0.5, 0.5], "stopping_strategy": "all_exhausted"}
    config = Config(dataset=files, split_dataset_ratio=0.1, data=data)
    loaded = load_datasets(config, tokenizer, 1)
    assert len(loaded.eval) == 11 and loaded.report.train.rows == len(loaded.train) > 140
    rows = [[tuple(row["input_ids"]) for row in part] for part in (loaded.train, loaded.eval)]
    assert not set(rows[0]) & set(rows[1]) and len(set(rows[0])) == 99
    text = "\n".join(loaded.report.summary_lines())
    assert "mixed by data.interleave_prob (all_exhausted)" in text
    assert sum(loaded.report.train.mixed.values()) == len(loaded.train)


def test_a_share_for_each_entry_or_none(files, tokenizer):
    config = Config(dataset=files, data={"interleave_prob": [1.0]})
    for use in (lambda: load_datasets(config, tokenizer, 1), lambda: check_rows(config)):
        with pytest.raises(SwiftFP8Error, match="1 shares for 2 data sets"):
            use()


def test_lists_say_what_they_hold():
    docs = field_docs()
    kinds = {"data.interleave_prob": "numbers", "export.tp": "whole numbers", "dataset": "texts"}
    assert {key: docs[key].type_text for key in kinds} == {
        key: f"list of {kind}" for key, kind in kinds.items()
    }

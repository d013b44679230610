"""`data.streaming`: the stream's order, its places, mixing, faults, and what the plan refuses."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from swiftfp8.config.schema import Config
from swiftfp8.data.dataset import check_rows, load_datasets
from swiftfp8.data.inspect import inspect_datasets
from swiftfp8.data.stream import ERROR, take_place
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.stream_plan import stream_notes, stream_problems


@pytest.fixture
def write(tmp_path):
    def write_rows(name, rows):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write_rows


def qa(count, word="q"):
    return [{"instruction": f"{word} {k}", "output": f"answer {k}"} for k in range(count)]


def config_of(dataset, **options):
    data = {"streaming": True, "shuffle_buffer": 16, **options.pop("data", {})}
    return Config(dataset=dataset, max_steps=9, max_length=64, data=data, **options)


def open_stream(tokenizer, dataset, **options):
    return load_datasets(config_of(dataset, **options), tokenizer, 8)


def samples(loaded, count):
    """So many samples' tokens, each with the place after it."""
    loader = DataLoader(loaded.train, batch_size=1, collate_fn=loaded.collator)
    found = []
    for batch in islice(loader, count):
        place = take_place(batch)
        found.append((batch["input_ids"].flatten().tolist(), place))
    return found


def asked(tokenizer, found):
    return [tokenizer.decode(ids).split("user\n")[1].split("<|im_end|>")[0] for ids, _ in found]


def test_a_pass_gives_every_row_once_and_the_next_in_another_order(tokenizer, write):
    loaded = open_stream(tokenizer, [write("a.jsonl", qa(40)), write("b.jsonl", qa(10, "r"))])
    found = asked(tokenizer, samples(loaded, 100))
    rows = {f"q {k}" for k in range(40)} | {f"r {k}" for k in range(10)}
    assert len(set(found[:50])) == 50 and set(found[:50]) == set(found[50:]) == rows
    assert found[:50] != found[50:]
    assert found[:16] != [f"q {k}" for k in range(16)]
    assert set(found[:16]) == {f"q {k}" for k in range(16)}  # shuffled within a block
    ordered = open_stream(tokenizer, [write("a.jsonl", qa(40))], data={"shuffle": False})
    assert asked(tokenizer, samples(ordered, 40)) == [f"q {k}" for k in range(40)]


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packs"])
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"interleave_prob": [0.7, 0.3]},
        {"interleave_prob": [0.5, 0.5], "stopping_strategy": "all_exhausted"},
        {"eval_rows": 7},
    ],
    ids=["one after the other", "mixed", "mixed until all are used", "eval rows"],
)
def test_from_any_place_the_stream_goes_on_as_it_would_have(tokenizer, write, data, packing):
    entries = [write("a.jsonl", qa(37)), write("b.jsonl", qa(23, "r"))]
    whole = samples(open_stream(tokenizer, entries, data=data, packing=packing), 60)
    for at in (0, 1, 15, 16, 33):
        again = open_stream(tokenizer, entries, data=data, packing=packing)
        again.train.start_at(json.loads(json.dumps(whole[at][1])))
        assert samples(again, 10) == whole[at + 1 : at + 11]


def test_rows_are_mixed_by_shares_until_one_entry_or_all_are_used_up(tokenizer, write):
    entries = [write("a.jsonl", qa(300)), write("b.jsonl", qa(300, "r"))]
    data = {"interleave_prob": [0.8, 0.2], "shuffle_buffer": 500}
    found = asked(tokenizer, samples(open_stream(tokenizer, entries, data=data), 300))
    assert 0.7 < sum(text.startswith("q") for text in found) / 300 < 0.9
    short = [write("a.jsonl", qa(30)), write("b.jsonl", qa(3, "r"))]
    data = {"interleave_prob": [0.5, 0.5], "stopping_strategy": "all_exhausted"}
    places = samples(open_stream(tokenizer, short, data=data), 200)
    first = asked(tokenizer, [one for one in places if one[1]["turn"] == 0])
    assert {text for text in first if text.startswith("q")} == {f"q {k}" for k in range(30)}
    assert first.count("r 0") > 1  # of the short one rows are repeated
    data["stopping_strategy"] = "first_exhausted"
    places = samples(open_stream(tokenizer, short, data=data), 200)
    first = asked(tokenizer, [one for one in places if one[1]["turn"] == 0])
    assert len(first) == len(set(first)) < 33


def test_evaluation_rows_are_the_first_and_never_trained(tokenizer, write):
    path = write("a.jsonl", qa(20))
    loaded = open_stream(tokenizer, [path], data={"eval_rows": 5})
    assert len(loaded.eval) == 5 and "first 5 rows" in loaded.report.eval_from
    found = asked(tokenizer, samples(loaded, 45))
    assert set(found) == {f"q {k}" for k in range(5, 20)} and len(found) == 45
    with pytest.raises(SwiftFP8Error, match="no more than 20 rows") as caught:
        open_stream(tokenizer, [path], data={"eval_rows": 20})
    assert caught.value.where == "data.eval_rows"
    explicit = open_stream(tokenizer, [path], val_dataset="quickstart#9")
    assert len(explicit.eval) == 9


def test_parquet_and_gzip_are_read_from_any_row_on(tokenizer, tmp_path, write):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(qa(25))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in qa(25)))
    plain = samples(open_stream(tokenizer, [write("a.jsonl", qa(25))]), 30)
    for name in ("a.parquet", "a.jsonl.gz"):
        entry = [str(tmp_path / name)]
        whole = samples(open_stream(tokenizer, entry), 30)
        assert whole == plain
        again = open_stream(tokenizer, entry)
        again.train.start_at(whole[17][1])
        assert samples(again, 12) == whole[18:30]


def test_a_hubs_rows_are_fetched_as_they_come(tokenizer, monkeypatch):
    import datasets

    asked_for = []

    def load(name, subset, *, split, streaming):
        asked_for.append((name, subset, split, streaming))
        return datasets.Dataset.from_list(qa(30)).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    whole = samples(open_stream(tokenizer, ["some/rows:part@test"]), 30)
    assert set(asked_for) == {("some/rows", "part", "test", True)}
    again = open_stream(tokenizer, ["some/rows:part@test"])
    again.train.start_at(whole[20][1])
    assert samples(again, 9) == whole[21:]


def test_a_bad_row_far_in_ends_the_stream_with_its_line(tokenizer, write):
    rows = [*qa(500), "{", *qa(20)]
    path = write("a.jsonl", rows)
    loaded = open_stream(tokenizer, [path])
    loader = DataLoader(loaded.train, batch_size=4, collate_fn=loaded.collator, num_workers=1)
    batches = list(loader)
    assert len(batches) == 496 // 4 + 1 and ERROR in batches[-1]
    with pytest.raises(SwiftFP8Error, match="malformed JSON") as caught:
        take_place(batches[-1])
    assert caught.value.where == f"{path}:501" and "on_bad_row=skip" in caught.value.fix
    skipping = open_stream(tokenizer, [path], data={"on_bad_row": "skip"})
    assert len(samples(skipping, 520)) == 520
    early = write("b.jsonl", [*qa(3), "{"])
    with pytest.raises(SwiftFP8Error, match=r"b\.jsonl:4: malformed JSON"):
        open_stream(tokenizer, [early])


def test_a_stream_without_a_row_to_train_on_is_an_error_and_not_an_endless_search(tokenizer, write):
    rows = [*qa(300), *[{"instruction": "long " * 99, "output": "a"}] * 20]
    loaded = open_stream(tokenizer, [write("a.jsonl", rows)], data={"eval_rows": 300})
    (batch,) = DataLoader(loaded.train, batch_size=1, collate_fn=loaded.collator)
    with pytest.raises(SwiftFP8Error, match="no row to train on"):
        take_place(batch)


@pytest.mark.parametrize("text", ["", "\n\n"])
@pytest.mark.parametrize("eval_rows", [0, 5])
def test_an_empty_file_is_named_before_the_run(tokenizer, write, text, eval_rows):
    full = write("a.jsonl", qa(20))
    empty = Path(full).with_name("empty.jsonl")
    empty.write_text(text)
    data = {"eval_rows": eval_rows}
    for dataset in ([str(empty)], [full, str(empty)]):
        for use in (check_rows, lambda config: load_datasets(config, tokenizer, 8)):
            with pytest.raises(SwiftFP8Error, match=r"empty.jsonl' has no rows") as caught:
                use(config_of(dataset, data=data))
            assert caught.value.where == str(empty)
            assert "one row a line" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_utf16_file_is_told_as_such(tokenizer, tmp_path, name):
    path = tmp_path / name
    text = "".join(json.dumps(row) + "\n" for row in qa(3)).encode("utf-16")
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    for skips in ("error", "skip"):
        with pytest.raises(SwiftFP8Error, match="not UTF-8 text: byte 0 is 0xff") as caught:
            open_stream(tokenizer, [str(path)], data={"on_bad_row": skips})
        assert caught.value.where == str(path) and "iconv -f utf-16" in caught.value.fix


def test_a_place_of_other_data_sets_is_refused(tokenizer, write):
    one, two = write("a.jsonl", qa(9)), write("b.jsonl", qa(9))
    place = samples(open_stream(tokenizer, [one]), 1)[0][1]
    with pytest.raises(SwiftFP8Error, match="a stream of 1 data sets"):
        open_stream(tokenizer, [one, two]).train.start_at(place)


def test_files_that_are_read_whole_are_refused(tokenizer, write):
    with pytest.raises(SwiftFP8Error, match=r"kind '.csv' are read whole") as caught:
        open_stream(tokenizer, [write("a.csv", ["instruction,output", "q,a"])])
    assert "data.streaming=false" in caught.value.fix
    with pytest.raises(SwiftFP8Error, match="can't be streamed from modelscope"):
        open_stream(tokenizer, ["some/rows"], hub="modelscope")


def test_looks_at_a_stream_are_at_its_first_rows(tokenizer, write, monkeypatch):
    path = write("a.jsonl", [*qa(300), "{"])
    monkeypatch.setattr("swiftfp8.data.streaming.HEAD", 30)
    config = config_of([path])
    lines = check_rows(config).lines
    assert lines[0] == "dataset: 30 rows can be used, of the first 30"
    found = inspect_datasets(config, tokenizer, sample=0, show=1).train
    assert (found.rows, found.total, len(found.bad)) == (30, 30, 0)
    held = load_datasets(config, tokenizer, 8, whole=True)
    assert len(held.train) == 30 and held.report.train.sources[0].rows == 30
    text = "\n".join(open_stream(tokenizer, [path]).report.summary_lines())
    assert "rows are not counted" in text and "streamed, format alpaca" in text


def test_the_plan_says_what_a_stream_can_not_do():
    def where(**options):
        return [problem.where for problem in stream_problems(Config(**options))]

    assert where(data={"streaming": True}) == ["max_steps"]
    assert where(data={"eval_rows": 3, "shuffle_buffer": 9}) == [
        "data.eval_rows",
        "data.shuffle_buffer",
    ]
    refused = {
        "task": "dpo",
        "split_dataset_ratio": 0.1,
        "dataset": "rows.jsonl#9",
        "val_dataset": "v.jsonl",
        "max_steps": 5,
        "train": {"tokens_per_step": 9},
        "data": {"streaming": True, "eval_rows": 3, "cache": True, "num_workers": 2, "num_proc": 2},
    }
    assert where(**refused) == [
        "data.streaming",
        "split_dataset_ratio",
        "data.eval_rows",
        "train.tokens_per_step",
        "data.cache",
        "data.num_workers",
        "data.num_proc",
        "dataset",
    ]
    fine = Config(max_steps=5, data={"streaming": True, "eval_rows": 3})
    assert not stream_problems(fine)
    (note,) = stream_notes(fine)
    assert "blocks of 10,000 rows" in note and "5 steps" in note and "first 3 rows" in note

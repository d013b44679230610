"""Kept tokens are those of the same job, and of no other."""

import json
import logging
import os
from dataclasses import replace

import pytest

from swiftfp8.config.schema import Config, DataConfig
from swiftfp8.data import dataset as stage
from swiftfp8.data.dataset import load_datasets
from swiftfp8.errors import SwiftFP8Error


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv("SWIFTFP8_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    lines = [{"instruction": f"question {k}", "output": f"answer {k}"} for k in range(30)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


@pytest.fixture
def load(tokenizer, rows, monkeypatch):
    """Load, and say whether rows were tokenized for it."""
    tokenize, calls = stage.tokenize_part, []
    monkeypatch.setattr(stage, "tokenize_part", lambda *a: calls.append(1) or tokenize(*a))

    def load_with(data=None, **options):
        calls.clear()
        settings = {"cache": True, **(data or {})}
        entry = options.pop("dataset", str(rows))
        config = Config(dataset=entry, data=DataConfig(**settings), **options)
        return load_datasets(config, tokenizer, 8), bool(calls)

    return load_with


def same(one, two):
    return listed(one) == listed(two)


def listed(rows):
    def plain(value):
        return value.tolist() if hasattr(value, "tolist") else value

    return rows and [{k: plain(v) for k, v in rows[i].items()} for i in range(len(rows))]


@pytest.mark.parametrize("packing", [False, True])
def test_the_second_load_gives_the_same_without_tokenizing(load, packing):
    options = {"split_dataset_ratio": 0.2, "packing": packing, "max_length": 128}
    plain, _ = load(data={"cache": False}, **options)
    first, made = load(**options)
    second, again = load(**options)
    assert made and not again
    said = ["\n".join(each.report.summary_lines()) for each in (plain, first, second)]
    assert "cache" not in said[0] and "tokens kept in" in said[1] and "tokens taken from" in said[2]
    for other in (first, second):
        assert same(plain.train, other.train) and same(plain.eval, other.eval)
        assert plain.report == replace(other.report, cached=None) and other.eval is not None


def test_what_changes_tokens_changes_the_key(load, rows, tokenizer):
    load()
    for changed in (
        {"max_length": 77},
        {"system": "Be brief."},
        {"task": "pretrain"},
        {"split_dataset_ratio": 0.1},
        {"val_dataset": str(rows)},
        {"dataset": f"{rows}#5"},
        {"data": {"truncation": "delete"}},
        {"data": {"on_bad_row": "skip"}},
        {"data": {"loss_scale": "last_round"}},
        {"data": {"interleave_prob": [1.0]}},
        {"data": {"format": "alpaca"}},
    ):
        assert load(**changed)[1], changed
        assert not load(**changed)[1], changed
    assert load(dataset=f"{rows}#5", seed=7)[1]
    tokenizer.chat_template = tokenizer.chat_template + "{# another #}"
    assert load()[1]
    assert not load()[1]
    os.utime(rows, ns=(1, 1))
    assert load()[1]


def test_packing_and_shuffling_share_the_rows(load):
    load()
    assert not load(packing=True)[1]
    assert not load(data={"shuffle": False})[1]


@pytest.mark.parametrize("fault", ["cut", "flipped", "other"])
def test_a_damaged_file_is_made_anew_with_a_note(load, tmp_path, fault, caplog):
    plain, _ = load()
    (path,) = (tmp_path / "cache" / "tokens").iterdir()
    data = bytearray(path.read_bytes())
    if fault == "flipped":
        data[len(data) // 3] ^= 0xFF
    path.write_bytes({"cut": data[: len(data) // 2], "flipped": data, "other": b"text"}[fault])
    with caplog.at_level(logging.WARNING, logger="swiftfp8"):
        mended, made = load()
    assert made and "made anew" in caplog.text and str(path) in caplog.text
    assert same(plain.train, mended.train)
    assert not load()[1]


def test_nothing_is_kept_unless_asked_and_a_missing_file_is_still_an_error(load, tmp_path):
    load(data={"cache": False})
    assert not (tmp_path / "cache").exists()
    with pytest.raises(SwiftFP8Error, match="no such file"):
        load(dataset=str(tmp_path / "gone.jsonl"))

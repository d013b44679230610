import json

import pytest

from swiftfp8.config.schema import Config
from swiftfp8.data.formats import BadRow, choose_format
from swiftfp8.data.task_formats import (
    TASK_FORMATS,
    Labelled,
    Preference,
    Rated,
    Related,
    task_formats,
)
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.tasks import TASKS, formats_of

USER, GOOD, BAD = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "assistant", "content": "b"},
)
SYSTEM = {"role": "system", "content": "s"}
PREFERENCE = Preference(prompt=[USER], chosen=[GOOD], rejected=[BAD])
GOOD_ONE = Rated(prompt=[USER], completion=[GOOD], good=True)

# One row of each format with what it becomes; a new format must add one.
EXAMPLES = {
    "label": ({"text": "words", "label": "x"}, Labelled(content="words", label="x")),
    "preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, PREFERENCE),
    "kto": ({"prompt": "q", "completion": "a", "label": True}, GOOD_ONE),
    "embedding": (
        {"anchor": "q", "positive": "a", "negative": "b"},
        Related(anchor="q", positive="a", negatives=("b",)),
    ),
}


def convert(row, *names):
    form, reason = choose_format(row, "auto", where="f:1", formats=task_formats(names), task="x")
    return form.convert(row), reason


def test_every_format_detects_and_converts_its_example():
    assert {form.name for form in TASK_FORMATS} == set(EXAMPLES)
    for name, (row, expected) in EXAMPLES.items():
        found, reason = convert(row, name)
        assert found == expected
        assert all(f"'{column}'" in reason for column in row)


def test_every_task_s_formats_exist():
    for task in TASKS:
        assert task_formats(formats_of(Config(task=task)))


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {"question": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"messages": [USER, GOOD], "rejected_response": "b"},
        {"prompt": "q", "chosen": json.dumps([USER, GOOD]), "rejected": json.dumps([USER, BAD])},
    ],
    ids=["alpaca", "question", "trl", "trl-repeated", "trl-implicit", "messages", "sharegpt",
         "swift", "table"],
)  # fmt: skip
def test_layouts_of_preferences(row):
    assert convert(row, "preference")[0] == PREFERENCE


def test_a_system_prompt_and_a_history_come_before_the_question():
    row = {"instruction": "q", "history": [["x", "y"]], "system": "s", "chosen": "a"}
    made, _ = convert({**row, "rejected": "b"}, "preference")
    assert [turn["content"] for turn in made.prompt] == ["s", "x", "y", "q"]
    listed = {"prompt": [USER], "system": "s", "chosen": "a", "rejected": "b"}
    assert convert(listed, "preference")[0].prompt == [SYSTEM, USER]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "completion": [GOOD], "label": 1},
        {"instruction": "q", "output": "a", "kto_tag": True},
        {"messages": [USER, GOOD], "label": "true"},
        {"prompt": "q", "completion": "a", "label": "True"},
    ],
)
def test_layouts_of_ratings(row):
    assert convert(row, "kto", "preference")[0] == GOOD_ONE


def test_ratings_may_come_as_preferences():
    assert convert(EXAMPLES["preference"][0], "kto", "preference")[0] == PREFERENCE


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"sentence": "x", "label": 3}, 3),
        ({"content": "x", "category": " sport "}, "sport"),
        ({"text": "x", "labels": ["a", "b"]}, ("a", "b")),
        ({"text": "x", "labels": '["a"]'}, ("a",)),
        ({"text": "x", "label": []}, ()),
        ({"text": "x", "label": 1.5}, 1.5),
        ({"messages": [USER, GOOD], "label": False}, False),
    ],
)
def test_labels_in_their_columns(row, label):
    assert convert(row, "label")[0].label == label


def test_several_negatives_or_none():
    row = {"query": "q", "pos": ["a"], "neg": ["b", "c"]}
    assert convert(row, "embedding")[0] == Related(anchor="q", positive="a", negatives=("b", "c"))
    assert convert({"query": "q", "positive": "a"}, "embedding")[0].negatives == ()


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "the same answer"),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": None}, "no rejected"),
        ("preference", {"prompt": "q", "chosen": " ", "rejected": "b"}, "chosen is empty"),
        ("preference", {"prompt": " ", "chosen": "a", "rejected": "b"}, "prompt is empty"),
        ("preference", {"prompt": "q", "chosen": [USER], "rejected": "b"}, "holds no answer"),
        ("preference", {"prompt": [GOOD], "chosen": "a", "rejected": "b"}, "not the user's"),
        ("preference", {"chosen": [GOOD], "rejected": [BAD]}, "no turn in common"),
        ("preference", {"prompt": "q", "chosen": 3, "rejected": "b"}, "not an object"),
        ("kto", {"prompt": "q", "completion": "a", "label": "often"}, "neither true nor false"),
        ("kto", {"prompt": "q", "completion": "a", "label": None}, "no 'label'"),
        ("label", {"text": "x", "label": None}, "no label"),
        ("label", {"text": "", "label": "a"}, "text is empty"),
        ("label", {"text": "x", "label": {"a": 1}}, "neither a name"),
        ("label", {"text": "x", "label": [1.5]}, "something else than names"),
        ("label", {"text": "x", "label": float("nan")}, "not a finite number"),
        ("embedding", {"anchor": "q", "positive": " "}, "positive is empty"),
        ("embedding", {"anchor": "q", "positive": "a", "negative": 3}, "neither a text nor a list"),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_used_say_why(name, row, reason):
    (form,) = task_formats([name])
    with pytest.raises(BadRow, match=reason):
        form.convert(row)


def test_columns_of_another_task_are_named_with_file_and_line():
    with pytest.raises(SwiftFP8Error) as caught:
        choose_format(
            {"instruction": "q", "output": "a"},
            "auto",
            where="rows.jsonl:1",
            formats=task_formats(["preference"]),
            task="dpo",
        )
    assert caught.value.where == "rows.jsonl:1"
    assert "task=dpo" in str(caught.value) and "chosen, rejected" in str(caught.value)


def test_a_format_of_another_task_can_not_be_asked_for():
    formats = task_formats(["preference"])
    with pytest.raises(SwiftFP8Error, match="nothing that task=dpo can learn from"):
        choose_format({"text": "x"}, "text", where="f:1", formats=formats, task="dpo")

import json

import pytest

from swiftfp8.data.formats import FORMATS, BadRow, choose_format, rename
from swiftfp8.data.task_formats import task_formats
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.tasks import TASKS

PARTS = [{"type": "text", "text": "q"}]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SHARED = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]

# One row of each format with what it becomes; a new format must add one.
EXAMPLES = {
    "messages": ({"messages": CHAT}, CHAT),
    "sharegpt": ({"conversations": SHARED}, CHAT),
    "alpaca": ({"instruction": "q", "input": "", "output": "a"}, CHAT),
    "text": ({"text": "some words"}, "some words"),
}


def convert(row, asked="auto"):
    form, _ = choose_format(row, asked, where="file:1")
    return form.convert(row)


def test_every_format_detects_and_converts_its_example():
    assert {form.name for form in FORMATS} == set(EXAMPLES)
    for name, (row, expected) in EXAMPLES.items():
        form, reason = choose_format(row, "auto", where="file:1")
        assert form.name == name
        assert any(column in reason for column in row), "the reason names the column"
        assert form.convert(row) == expected


@pytest.mark.parametrize(
    ("row", "first"),
    [
        ({"conversations": CHAT}, CHAT[0]),
        ({"messages": [{"role": "user", "content": PARTS}, CHAT[1]]}, CHAT[0]),
        ({"messages": json.dumps(CHAT)}, CHAT[0]),
        ({"conversations": SHARED, "system": "s"}, {"role": "system", "content": "s"}),
        ({"query": "q", "response": "a"}, CHAT[0]),
        ({"instruction": "q", "input": " ", "output": "a"}, CHAT[0]),
        ({"instruction": "q", "output": "a", "system": "s"}, {"role": "system", "content": "s"}),
        ({"instruction": "r", "output": "a", "history": [["q", "b"]]}, CHAT[0]),
    ],
)  # fmt: skip
def test_variants(row, first):
    messages = convert(row)
    assert messages[0] == first and messages[-1] == CHAT[1]


def test_input_follows_the_instruction_on_a_new_line():
    assert convert({"instruction": "do", "input": "it", "output": "a"})[0]["content"] == "do\nit"


def test_history_comes_before_the_question():
    messages = convert({"instruction": "q", "output": "a", "history": [["p", "b"], ["r", "c"]]})
    assert [m["content"] for m in messages] == ["p", "b", "r", "c", "q", "a"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "empty"),
        ({"messages": "hello"}, "not a list of turns"),
        ({"messages": CHAT[:1]}, "last turn is not the assistant's"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": " \n"}]}, "turn is empty"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "no content of turn 2"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": 5}]}, "not text: 5"),
        ({"messages": [CHAT[0], {"role": "bot", "content": "a"}]}, "unknown role 'bot'"),
        ({"messages": [CHAT[1]]}, "first turn is the assistant's"),
        ({"messages": [CHAT[0], CHAT[0], CHAT[1]]}, "two user turns in a row"),
        ({"messages": [*CHAT, CHAT[1]]}, "two assistant turns in a row"),
        ({"messages": [*CHAT, {"role": "system", "content": "s"}]}, "system turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts that are not"),
        ({"other": 1}, "no 'messages'"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half a character"),
        ({"messages": [{"role": "user", "content": ["\ud83d"]}]}, "half a character"),
    ],
)  # fmt: skip
def test_faults_of_messages(row, reason):
    with pytest.raises(BadRow, match=reason):
        convert(row, "messages")


@pytest.mark.parametrize(
    ("row", "asked", "reason"),
    [
        ({"instruction": "q", "output": ""}, "alpaca", "no answer"),
        ({"instruction": "q"}, "alpaca", "no output"),
        ({"instruction": None, "output": "a"}, "alpaca", "no instruction"),
        ({"instruction": "q", "output": 3.5}, "alpaca", "output is not text"),
        ({"instruction": "q", "output": "a", "history": [["p"]]}, "alpaca", "history item 1"),
        ({"instruction": "q", "output": "a", "history": 5}, "alpaca", "not a list of pairs"),
        ({"instruction": "q", "output": "\udfff"}, "alpaca", "half a character"),
        ({"conversations": SHARED[1:]}, "sharegpt", "first turn"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "sharegpt", "unknown role 'alien'"),
        ({"text": "  "}, "text", "empty"),
        ({"text": None}, "text", "no text"),
    ],
)
def test_faults_of_other_formats(row, asked, reason):
    with pytest.raises(BadRow, match=reason):
        convert(row, asked)


def test_no_format_fits_lists_the_columns_and_the_formats():
    with pytest.raises(SwiftFP8Error, match="columns frage, antwort") as caught:
        choose_format({"frage": "q", "antwort": "a"}, "auto", where="f:1")
    assert (
        "rename columns, as 'data.columns={ask: instruction, reply: output}'; " in caught.value.fix
    )
    assert "task=" not in caught.value.fix
    assert all(form.name in caught.value.fix for form in FORMATS)


@pytest.mark.parametrize(
    ("row", "task", "advised"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "sft", "dpo"),
        ({"sentence": "q", "label": "a"}, "sft", "seq_cls"),
        ({"instruction": "q", "output": "a"}, "dpo", "sft"),
    ],
)
def test_rows_of_another_task_are_told_to_set_it(row, task, advised):
    formats = task_formats(TASKS[task].formats)
    with pytest.raises(SwiftFP8Error) as caught:
        choose_format(row, "auto", where="rows:1", formats=formats, task=task)
    assert caught.value.fix.startswith(f"set task={advised}, which reads rows with column")


def test_renamed_columns_are_detected():
    row = rename({"frage": "q", "antwort": "a"}, {"frage": "instruction", "antwort": "output"})
    assert convert(row) == CHAT

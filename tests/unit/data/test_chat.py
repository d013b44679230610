"""The loss mask, on templates of every kind seen in the wild, written here in their shape."""

import random

import pytest

from swiftfp8.config.schema import Config
from swiftfp8.data.chat import Example, TokenizeSettings, tokenize_rows
from swiftfp8.data.lengths import MASKED, fit_rows
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.tasks import task_problems

CHATML = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    # system text folded into the first question, contents trimmed, roles renamed
    "folded": """{%- set ns = namespace(first='') %}
{%- for m in messages %}{% if m.role == 'system' %}{% set ns.first = m.content | trim + '\\n\\n' %}
{%- elif m.role == 'user' %}
{{- '<|im_start|>user\\n' + ns.first + m.content | trim + '<|im_end|>\\n' }}{% set ns.first = '' %}
{%- else %}
{{- '<|im_start|>model\\n' + m.content | trim + '<|im_end|>\\n' }}{% endif %}{%- endfor %}""",
    # brackets of several ordinary tokens, a blank before the answer and before its end
    "bracketed": """{%- for m in messages %}{% if m.role == 'assistant' %}
{{- ' ' + m.content + ' <|im_end|>' }}{% elif m.role == 'user' %}
{{- '<|im_start|>[INST] ' + m.content + ' [/INST]' }}{% else %}
{{- '<<SYS>>' + m.content + '<</SYS>>\\n\\n' }}{% endif %}{%- endfor %}""",
    # always asks for a further answer at the end
    "dangling": """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{%- endfor %}
{{- '<|im_start|>assistant\\n' }}""",
    # a fixed system prompt where the row has none
    "default system": """{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"""
    + CHATML,
    # no token that ends a turn
    "no end": """{%- for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}
{%- endfor %}""",
    "marks itself": """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{%- endfor %}""",
    # marks the words but not their end
    "marks words": """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{%- endfor %}""",
}

# Qwen3's habit: earlier reasoning is dropped, the last answer gets an empty one if it has none.
REASONING = """{%- for m in messages %}{% if m.role == 'assistant' %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ said + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{%- endfor %}"""  # noqa: E501


def chat(*turns, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": turn} for k, turn in enumerate(turns)]
    return ([{"role": "system", "content": system}] if system else []) + messages


def tokenize(tokenizer, *contents, **changed):
    settings = {"max_length": 4096, "truncation": "right", "system": None, "whole": False}
    examples = [Example(content=c, where=f"file:{k}") for k, c in enumerate(contents, start=1)]
    parts = list(tokenize_rows(examples, tokenizer, TokenizeSettings(**settings | changed)))
    assert sum(part.examples for part in parts) == len(examples)
    (part,) = parts
    return part


def trained_runs(tokenizer, labels):
    """Decoded text of each unbroken run of tokens with a loss."""
    runs, run = [], []
    for label in [*labels, MASKED]:
        if label != MASKED:
            run.append(int(label))
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


CASES = [
    chat("What is it?", "A test."),
    chat("one", "first", "two", "second", "three", "third"),
    chat("hello", "hi", "hello", "hi"),  # equal turns
    chat("user", "assistant", "assistant", "user"),  # contents that templates hold too
    chat("x", "a"),
    chat("Write code", "```\n    x = 1\n\n```"),
    chat("q", "Ünïcödé 😀 你好"),
    chat("q", "with system", "r", "again", system="Be brief."),
    chat("{{ messages }} {% raw %}", "{% endraw %} {{ 1 }}"),
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CASES, ids=range(len(CASES)))
def test_answers_and_their_end_are_trained_and_nothing_else(tokenizer, name, messages):
    tokenizer.chat_template = TEMPLATES[name]
    part = tokenize(tokenizer, messages)
    assert not part.bad and not part.fitted.dropped
    ((ids, labels),) = part.fitted.pairs
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    runs = trained_runs(tokenizer, labels)
    assert [run.replace("<|im_end|>", "").strip() for run in runs] == answers
    ended = runs[-1:] if name == "no end" else runs
    assert all(run.endswith("<|im_end|>") for run in ended)
    assert ((labels == MASKED) | (labels == ids)).all()


@pytest.mark.parametrize("name", ["chatml", "folded", "bracketed", "default system"])
def test_ids_are_the_templates_own_up_to_the_last_end(tokenizer, name):
    tokenizer.chat_template = TEMPLATES[name]
    for messages in CASES:
        ((ids, _),) = tokenize(tokenizer, messages).fitted.pairs
        reference = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert ids.tolist() == reference[: len(ids)]
        assert tokenizer.decode(reference[len(ids) :]).strip() == ""


def test_mask_equals_that_of_growing_prefixes_on_random_chats(tokenizer):
    """ChatML renders a prefix of the turns as a prefix of the text: an independent way to mask."""
    rng = random.Random(3)
    words = ["user", "assistant", "\n", "a", " b", "<", "im_end", "é", "  ", ".", "I am", "7"]
    for _ in range(40):
        turns = [
            "x" + "".join(rng.choices(words, k=rng.randint(1, 9))) + "y"
            for _ in range(2 * rng.randint(1, 4))
        ]
        messages = chat(*turns, system=rng.choice([None, "s"]))
        ((_, labels),) = tokenize(tokenizer, messages).fitted.pairs
        expected = []
        for k in range(len(messages)):
            text = tokenizer.apply_chat_template(messages[: k + 1], tokenize=False)
            size = len(tokenizer(text)["input_ids"])
            if messages[k]["role"] == "assistant":
                prompt = tokenizer.apply_chat_template(
                    messages[:k], tokenize=False, add_generation_prompt=True
                )
                begin = len(tokenizer(prompt)["input_ids"])
                expected += [MASKED] * (begin - len(expected)) + [0] * (size - 1 - begin)
        assert [0 if label != MASKED else MASKED for label in labels] == expected


def test_reasoning_is_trained_where_the_template_keeps_it(tokenizer):
    tokenizer.chat_template = REASONING
    kept = "<think>\nwhy\n</think>\n\nbecause"
    messages = chat("q", "<think>\nearlier\n</think>\n\nfirst", "r", kept)
    ((_, labels),) = tokenize(tokenizer, messages).fitted.pairs
    assert trained_runs(tokenizer, labels) == ["first<|im_end|>", kept + "<|im_end|>"]


def test_an_empty_reasoning_that_the_template_adds_is_not_trained(tokenizer):
    tokenizer.chat_template = REASONING
    ((ids, labels),) = tokenize(tokenizer, chat("q", "4")).fitted.pairs
    assert "<think>" in tokenizer.decode(ids)
    assert trained_runs(tokenizer, labels) == ["4<|im_end|>"]


def test_system_prompt_is_added_where_there_is_none(tokenizer):
    with_own = chat("q", "a", system="own")
    part = tokenize(tokenizer, chat("q", "a"), with_own, system="given")
    texts = [tokenizer.decode(ids) for ids, _ in part.fitted.pairs]
    assert "given" in texts[0] and "own" in texts[1] and "given" not in texts[1]


def test_a_template_that_hides_the_answer_makes_bad_rows(tokenizer):
    tokenizer.chat_template = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content | upper) + '<|im_end|>' }}{% endfor %}"""
    part = tokenize(tokenizer, chat("q", "answer"))
    assert [place.where for place in part.bad] == ["file:1"] and "turn 2" in part.bad[0].reason


def test_a_template_that_refuses_a_row_makes_it_a_bad_row(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        + CHATML
    )
    part = tokenize(tokenizer, chat("q", "a"), chat("q", "a", system="s"))
    assert len(part.fitted.pairs) == 1
    assert part.bad[0].where == "file:2" and "no system here" in part.bad[0].reason


def test_a_template_that_glues_the_answer_to_its_own_text_is_an_error(tokenizer):
    assert len(tokenizer("the")["input_ids"]) == 1
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'th' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    with pytest.raises(SwiftFP8Error, match="would train `the` for the answer `e`") as caught:
        tokenize(tokenizer, chat("q", "e"))
    assert caught.value.where == "file:1"


def test_no_chat_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(SwiftFP8Error, match="no chat template") as caught:
        tokenize(tokenizer, chat("q", "a"))
    assert "template=" in caught.value.fix
    assert len(tokenize(tokenizer, "plain text needs none").fitted.pairs) == 1


def test_plain_text_is_trained_whole_and_ended(tokenizer):
    ((ids, labels),) = tokenize(tokenizer, "Once upon a time").fitted.pairs
    assert ids.tolist() == labels.tolist() == [*tokenizer("Once upon a time")["input_ids"], 2]


def test_whole_conversations_are_trained_from_first_to_last_end(tokenizer):
    tokenizer.chat_template = TEMPLATES["dangling"]
    ((ids, labels),) = tokenize(tokenizer, chat("q", "a"), whole=True).fitted.pairs
    assert ids.tolist() == labels.tolist()
    assert tokenizer.decode(ids).endswith("a<|im_end|>")


def test_long_rows_are_cut_split_or_dropped(tokenizer):
    long_answer, long_question = chat("q", "word " * 100), chat("word " * 100, "a")
    text = "word " * 100
    part = tokenize(tokenizer, long_answer, long_question, text, max_length=32).fitted
    assert part.truncated == 2 and part.split == 1
    assert part.dropped == {"no token to learn within max_length=32": 1}
    assert max(len(ids) for ids, _ in part.pairs) == 32
    whole = [*tokenizer(text)["input_ids"], 2]
    assert [i for ids, labels in part.pairs if labels[0] != MASKED for i in ids] == whole
    part = tokenize(
        tokenizer, long_answer, long_question, chat("q", "a"), max_length=32, truncation="delete"
    ).fitted
    assert len(part.pairs) == 1 and part.dropped == {"longer than max_length=32": 2}


def test_left_truncation_keeps_the_end_and_the_first_token(tokenizer):
    row = chat("word " * 40, "an answer", "and", "the last answer")
    ((whole, labels),) = tokenize(tokenizer, row).fitted.pairs
    ((ids, cut),) = tokenize(tokenizer, row, max_length=24, truncation="left").fitted.pairs
    assert ids.tolist() == whole[-24:].tolist() and cut.tolist() == labels[-24:].tolist()
    fitted = fit_rows([(whole, labels)], 24, "left", bos=int(whole[0]))
    ((ids, cut),) = fitted.pairs
    assert ids.tolist() == [whole[0], *whole[-23:]] and fitted.truncated == 1
    assert cut.tolist() == [MASKED, *labels[-23:]]


def test_split_conversations_go_on_and_lose_only_rows_without_an_answer(tokenizer):
    row = chat("word " * 60, "an answer " * 30, "q", "a")
    ((whole, labels),) = tokenize(tokenizer, row).fitted.pairs
    fitted = tokenize(tokenizer, row, max_length=32, truncation="split").fitted
    assert fitted.split == 1 and not fitted.truncated and not fitted.dropped
    assert all(len(ids) <= 32 for ids, _ in fitted.pairs)
    learned = [label for _, part in fitted.pairs for label in part.tolist() if label != MASKED]
    assert learned == [label for label in labels.tolist() if label != MASKED]
    assert sum(len(ids) for ids, _ in fitted.pairs) < len(whole)
    lost = tokenize(tokenizer, chat("word " * 60, "a"), max_length=32, truncation="right").fitted
    assert list(lost.dropped.values()) == [1]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("default", ["<think>\n\n</think>\n\none<|im_end|>", "two<|im_end|>", "three<|im_end|>"]),
        ("ignore_empty_think", ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]),
        ("last_round", ["two<|im_end|>", "three<|im_end|>"]),
    ],
)
def test_loss_scale_chooses_the_trained_turns(tokenizer, scale, expected):
    tokenizer.chat_template = CHATML
    tool = {"role": "tool", "content": "result"}
    row = chat("q", "<think>\n\n</think>\n\none", "r", "two")
    row += [tool, {"role": "assistant", "content": "three"}]
    ((_, labels),) = tokenize(tokenizer, row, loss_scale=scale).fitted.pairs
    assert trained_runs(tokenizer, labels) == expected


def test_a_row_whose_only_answer_is_an_empty_thought_is_dropped(tokenizer):
    tokenizer.chat_template = CHATML
    rows = [chat("q", "<think>\n\n</think>\n\n"), chat("q", "a")]
    fitted = tokenize(tokenizer, *rows, loss_scale="ignore_empty_think").fitted
    assert len(fitted.pairs) == 1 and sum(fitted.dropped.values()) == 1


def test_other_tasks_refuse_what_only_conversations_have():
    data = {"loss_scale": "all", "truncation": "left"}
    problems = task_problems(Config(task="dpo", data=data))
    assert {problem.where for problem in problems} == {"data.loss_scale", "data.truncation"}
    assert not task_problems(Config(data=data))

"""`data.loss_weights`: which tokens weigh what, and that the weights stay with their tokens."""

from itertools import groupby

import numpy as np
import pytest
from test_chat import CHATML, chat
from test_chat_tools import CHANNELS, THINKING, TRIMMING, answer, call, result, user

from swiftfp8.config.schema import Config
from swiftfp8.data.chat import Example, TokenizeSettings, tokenize_rows
from swiftfp8.data.dataset import load_datasets
from swiftfp8.data.lengths import MASKED
from swiftfp8.data.parts import tokenize_settings
from swiftfp8.tasks import task_notes, task_problems

ALL = {"reasoning": 0.5, "tool_call": 2.0, "assistant": 1.5, "history": 0.1}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def weighed(tokenizer, template, messages, weights, **changed):
    """Trained text and its weight, run by run."""
    tokenizer.chat_template = template
    settings = {"max_length": 4096, "truncation": "right", "system": None, "whole": False}
    settings = TokenizeSettings(**settings | changed, loss_weights=weights)
    example = Example(content=messages, where="file:1")
    (part,) = tokenize_rows([example], tokenizer, settings)
    assert not part.bad, part.bad
    ((ids, labels, got),) = part.fitted.pairs
    assert got.dtype == np.float32 and len(ids) == len(labels) == len(got)
    runs = groupby(zip(ids, labels, got, strict=True), key=lambda t: (t[1] != MASKED, float(t[2])))
    found = [(key, tokenizer.decode([int(t[0]) for t in run])) for key, run in runs]
    return [(text, pytest.approx(weight)) for (trained, weight), text in found if trained]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            THINKING,
            [user("q"), answer("a", reasoning_content="why")],
            [("<think>\nwhy\n</think>", 0.5), ("\n\na<|im_end|>", 1.5)],
        ),
        (
            CHATML,
            chat("q", "<think>\nwhy\n</think>\n\na"),
            [("<think>\nwhy\n</think>", 0.5), ("\n\na<|im_end|>", 1.5)],
        ),
        (
            THINKING,
            [user("q"), call("Paris", content="Let me see."), result("sun"), answer("Sunny.")],
            [("Let me see.", 1.5), ("\n" + CALLED, 2.0), ("<|im_end|>", 1.5),
             ("Sunny.<|im_end|>", 1.5)],
        ),
        (
            THINKING,
            [user("q"), call("Paris", reasoning_content="hm")],
            [("<think>\nhm\n</think>", 0.5), ("\n\n" + CALLED, 2.0), ("<|im_end|>", 1.5)],
        ),
        # a call that replaces the words, and one within them
        (
            TRIMMING,
            [user("q"), call("Paris", content="unsaid"), result("sun"), answer("Sunny.")],
            [('{"name": "weather", "parameters": {"city": "Paris"}}', 2.0), ("<|endoftext|>", 1.5),
             ("Sunny.<|im_end|>", 1.5)],
        ),
        (
            CHATML,
            chat("q", f"I look.\n{CALLED}\nDone."),
            [("I look.\n", 1.5), (CALLED, 2.0), ("\nDone.<|im_end|>", 1.5)],
        ),
        # no mark ends the reasoning
        (
            CHANNELS,
            [user("q"), answer("a", reasoning_content="why so")],
            [(" to=analysis\nwhy so", 0.5),
             ("<|im_end|><|im_start|>assistant to=final\na<|im_end|>", 1.5)],
        ),
        # the factor of earlier answers multiplies what is theirs
        (
            CHATML,
            chat("q", "one", "r", "<think>t</think>two", "s", "three"),
            [("one<|im_end|>", 0.15), ("<think>t</think>", 0.05), ("two<|im_end|>", 0.15),
             ("three<|im_end|>", 1.5)],
        ),
    ],
    ids=["reasoning", "inline reasoning", "words and call", "reasoning and call", "call alone",
         "inline call", "channels", "history"],
)  # fmt: skip
def test_parts_of_answers_have_their_weights(tokenizer, template, messages, expected):
    assert weighed(tokenizer, template, messages, ALL) == expected


def test_a_weight_of_zero_trains_nothing(tokenizer):
    messages = chat("q", "<think>why</think>a")
    assert weighed(tokenizer, CHATML, messages, {"reasoning": 0}) == [("a<|im_end|>", 1.0)]


def test_prompts_weigh_what_is_asked_where_all_is_trained(tokenizer):
    got = weighed(tokenizer, CHATML, chat("q", "a"), {"prompt": 0.1, "assistant": 3}, whole=True)
    assert got == [
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", 0.1),
        ("a<|im_end|>", 3.0),
    ]


def test_an_ignored_empty_thought_leaves_the_answer_its_weight(tokenizer):
    messages = chat("q", "<think>\n\n</think>\n\na")
    got = weighed(tokenizer, CHATML, messages, {"assistant": 2}, loss_scale="ignore_empty_think")
    assert got == [("a<|im_end|>", 2.0)]


def test_an_end_that_the_template_lacks_is_added_with_the_answers_weight(tokenizer):
    bare = "{%- for m in messages %}{{ '# ' + m.role + '\\n' + m.content + '\\n' }}{%- endfor %}"
    (run,) = weighed(tokenizer, bare, chat("q", "a"), {"assistant": 2})
    assert run == ("a" + tokenizer.eos_token, 2.0)


@pytest.mark.parametrize("truncation", ["left", "split", "right"])
def test_weights_are_cut_with_their_tokens(tokenizer, truncation):
    words = " ".join(f"w{k}" for k in range(40))
    row = chat("q", f"<think>{words}</think>{words}")
    tokenizer.chat_template = CHATML
    settings = {"system": None, "whole": False, "loss_weights": {"reasoning": 0.5}}
    parts = [
        part
        for limit, how in ((4096, "right"), (50, truncation))
        for part in tokenize_rows(
            [Example(content=row, where="f:1")],
            tokenizer,
            TokenizeSettings(max_length=limit, truncation=how, **settings),
        )
    ]
    ((ids, _, weights),), cut = parts[0].fitted.pairs, parts[1].fitted.pairs
    whole = list(zip(ids.tolist(), weights.tolist(), strict=True))
    for piece, _, own in cut:
        found = list(zip(piece.tolist(), own.tolist(), strict=True))
        assert len(found) <= 50
        assert any(whole[k : k + len(found)] == found for k in range(len(whole)))


def rows_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    said = ["<think>long thought here</think>yes", "no", "<think>t</think>perhaps it is so"]
    path.write_text(
        "".join(f'{{"instruction": "q{k}", "output": "{s}"}}\n' for k, s in enumerate(said))
    )
    return str(path)


def load(tokenizer, path, **options):
    weights = {"loss_weights": {"reasoning": 0.5, "assistant": 2.0}}
    data = {**weights, **options.pop("data", {})}
    tokenizer.chat_template = CHATML
    return load_datasets(Config(dataset=[path], data=data, max_length=64, **options), tokenizer, 8)


def test_padded_and_packed_batches_hold_each_tokens_weight(tokenizer, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "plain words"}\n')
    path = rows_file(tmp_path)
    plain = load(tokenizer, path)
    batch = plain.collator([plain.train[k] for k in range(3)])
    assert batch["loss_weights"].shape == batch["labels"].shape
    for k in range(3):
        row = plain.train[k]
        size = len(row["input_ids"])
        assert batch["loss_weights"][k, :size].tolist() == row["loss_weights"]
        assert not batch["loss_weights"][k, size:].any()
    packed = load(tokenizer, path, packing=True)
    packs = packed.collator([packed.train[k] for k in range(len(packed.train))])
    trained = packs["labels"] != MASKED
    want = sorted(
        (token, weight)
        for k in range(3)
        for token, label, weight in zip(*plain.train[k].values(), strict=True)
        if label != MASKED
    )
    got = sorted(
        zip(packs["labels"][trained].tolist(), packs["loss_weights"][trained].tolist(), strict=True)
    )
    assert got == want and {w for _, w in got} == {0.5, 2.0}
    mixed = load_datasets(
        Config(dataset=[path, str(text)], data={"loss_weights": {"assistant": 2.0}}), tokenizer, 8
    )
    assert {1.0} in [set(row["loss_weights"]) for row in (mixed.train[k] for k in range(4))]


def test_the_cache_and_other_processes_keep_weights(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("SWIFTFP8_CACHE", str(tmp_path / "cache"))
    path = rows_file(tmp_path)
    fresh = load(tokenizer, path, data={"cache": True, "num_proc": 2})
    kept = load(tokenizer, path, data={"cache": True})
    one = load(tokenizer, path)
    assert "taken from" in kept.report.cached
    for other in (kept, one):
        assert [fresh.train[k] for k in range(3)] == [other.train[k] for k in range(3)]


def test_weights_of_one_are_none_at_all(tokenizer, tmp_path):
    config = Config(dataset="quickstart", data={"loss_weights": {"assistant": 1}})
    assert not tokenize_settings(config).loss_weights
    assert set(load_datasets(config, tokenizer, 8).train[0]) == {"input_ids", "labels"}


def test_weights_that_weigh_nothing_are_refused():
    def where(**options):
        return [problem.where for problem in task_problems(Config(**options))]

    weights = {"loss_weights": {"prompt": 0.5}}
    assert where(data=weights) == ["data.loss_weights.prompt"]
    assert where(data=weights, task="dpo") == ["data.loss_weights"]
    assert not where(data={**weights, "loss_scale": "all"})
    assert not where(data=weights, task="pretrain")
    (note,) = task_notes(Config(data={"loss_weights": {"reasoning": 0.5}}))
    assert "reasoning 0.5" in note and "mean by weight" in note

import json

import numpy as np
import pytest
import torch

from swiftfp8.config.schema import Config
from swiftfp8.data.dataset import load_datasets
from swiftfp8.data.labels import find_head
from swiftfp8.errors import SwiftFP8Error

PREFERENCE = {
    "prompt": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
    "chosen": "four",
    "rejected": "five six",
}
KTO = {"loss_type": "kto"}


@pytest.fixture
def load(tmp_path, plain_tokenizer):
    def load_rows(rows, *, multiple=1, pooling=None, held=None, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        if held is not None:
            (tmp_path / "held.jsonl").write_text("\n".join(json.dumps(row) for row in held))
            options["val_dataset"] = str(tmp_path / "held.jsonl")
        config = Config(dataset=str(path), **options)
        head = find_head(config) if config.task == "seq_cls" else None
        return load_datasets(config, plain_tokenizer, multiple, head=head, pooling=pooling)

    return load_rows


def text_of(tokenizer, ids, labels):
    return tokenizer.decode([int(i) for i, y in zip(ids, labels, strict=True) if y != -100])


def test_only_the_last_answer_of_a_preference_is_scored(load, plain_tokenizer):
    row = load([PREFERENCE], task="dpo").train[0]
    ends = plain_tokenizer.eos_token
    chosen = text_of(plain_tokenizer, row["chosen_ids"], row["chosen_labels"])
    rejected = text_of(plain_tokenizer, row["rejected_ids"], row["rejected_labels"])
    assert "two" in plain_tokenizer.decode(row["chosen_ids"])
    assert "two" not in chosen and chosen.startswith("four") and rejected.startswith("five six")
    assert ends is None or len(chosen) > len("four")  # with the token that ends the turn


def test_a_batch_has_chosen_answers_above_rejected_ones(load):
    data = load([PREFERENCE, {**PREFERENCE, "chosen": "a long answer indeed"}], task="dpo",
                multiple=16)  # fmt: skip
    batch = data.collator([data.train[0], data.train[1]])
    assert batch["input_ids"].shape[0] == 4 and batch["input_ids"].shape[1] % 16 == 0
    row = data.train[1]
    size = len(row["chosen_ids"])
    assert batch["input_ids"][1, :size].tolist() == row["chosen_ids"].tolist()
    assert batch["attention_mask"][1].sum() == size
    assert batch["labels"][1, :size].tolist() == row["chosen_labels"].tolist()
    assert (batch["labels"][1, size:] == -100).all()
    known = data.train.with_values(ref_logps=np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32))
    assert data.collator([known[0], known[1]])["ref_logps"].tolist() == [1.0, 3.0, 2.0, 4.0]


def test_an_answer_is_cut_and_a_preference_without_one_is_dropped(load, caplog):
    long = {**PREFERENCE, "prompt": "word " * 80}
    cut = {**PREFERENCE, "rejected": "word " * 80}
    data = load([PREFERENCE, long, cut], task="dpo", max_length=60)
    assert len(data.train) == 2
    assert len(data.train[1]["rejected_ids"]) == 60
    assert data.report.train.truncated == 1
    assert data.report.train.dropped == {"no answer within max_length=60": 1}
    data = load([PREFERENCE, long, cut], task="dpo", max_length=60, data={"truncation": "delete"})
    assert len(data.train) == 1


def test_rated_rows_get_another_row_s_answer(load):
    rows = [
        {"prompt": f"question {word}", "completion": word, "label": k % 2 == 0}
        for k, word in enumerate(["red", "green", "blue"])
    ]
    data = load(rows, task="dpo", rlhf=KTO)
    again = load(rows, task="dpo", rlhf=KTO)
    answers = []
    for k in range(3):
        row, same = data.train[k], again.train[k]
        start = int(np.argmax(row["labels"] != -100))
        assert row["kl_ids"][:start].tolist() == row["ids"][:start].tolist()
        assert row["kl_ids"].tolist() == same["kl_ids"].tolist()
        own = row["ids"][start:].tolist()
        assert row["kl_ids"][start:].tolist() != own
        answers.append((own, row["kl_ids"][start:].tolist()))
    assert sorted(own for own, _ in answers) == sorted(other for _, other in answers)
    batch = data.collator([data.train[k] for k in range(3)])
    assert batch["good"].tolist() == [True, False, True] and len(batch["input_ids"]) == 6


def test_kto_takes_a_preference_for_two_ratings(load):
    data = load([PREFERENCE], task="dpo", rlhf=KTO)
    assert [bool(data.train[k]["good"]) for k in range(2)] == [True, False]


def test_labelled_texts_keep_their_special_tokens(load, plain_tokenizer):
    rows = [{"text": "short", "label": "a"}, {"text": "word " * 50, "label": "b"}]
    data = load(rows, task="seq_cls", max_length=10)
    batch = data.collator([data.train[0], data.train[1]])
    assert batch["targets"].tolist() == [0, 1] and batch["input_ids"].shape == (2, 10)
    assert data.report.train.truncated == 1
    assert data.train[0]["ids"].tolist() == plain_tokenizer("short")["input_ids"]


def test_a_conversation_is_classified_as_the_template_writes_it(load, plain_tokenizer):
    messages = PREFERENCE["prompt"]
    rows = [{"messages": messages, "label": "a"}, {"messages": messages[:1], "label": "b"}]
    ids = load(rows, task="seq_cls").train[0]["ids"]
    assert plain_tokenizer.decode(ids) == plain_tokenizer.apply_chat_template(
        messages, tokenize=False
    )


def test_a_label_that_training_lacks_is_a_bad_row(load):
    rows = [{"text": "x", "label": "a"}, {"text": "y", "label": "b"}]
    with pytest.raises(SwiftFP8Error) as caught:
        load(rows, held=[*rows, {"text": "z", "label": "c"}], task="seq_cls")
    assert "held.jsonl:3: no training row has the label: 'c'" in str(caught.value)


def test_a_row_of_another_format_is_named_with_its_line(load):
    with pytest.raises(SwiftFP8Error, match=r"rows\.jsonl:2: no rejected"):
        load([PREFERENCE, {"prompt": "q", "chosen": "a"}], task="dpo")


def test_related_texts_share_a_batch(load, plain_tokenizer):
    rows = [
        {"anchor": "q", "positive": "same", "negative": ["n", "m"]},
        {"anchor": "r", "positive": "same", "negative": []},
        {"anchor": "s", "positive": "other", "negative": "n"},
    ]
    options = {"per_device_train_batch_size": 3, "embedding": {"query_prefix": "ask: "}}
    data = load(rows, task="embedding", pooling="last_token", **options)
    batch = data.collator([data.train[k] for k in range(3)])
    assert batch["input_ids"].shape[0] == 9 and batch["same"].shape == (3, 6)
    assert batch["same"].tolist()[0] == [True, True, False, False, False, False]
    assert torch.equal(batch["same"].diagonal(), torch.ones(3, dtype=torch.bool))
    first = data.train[0]["anchor"].tolist()
    assert first[-1] == plain_tokenizer.eos_token_id
    assert plain_tokenizer.decode(first[:-1]) == "ask: q"


def test_an_anchor_alone_in_its_batch_needs_a_negative(load):
    row = {"anchor": "q", "positive": "a"}
    with pytest.raises(SwiftFP8Error, match="there are none"):
        load([row, row], task="embedding", pooling="mean")
    assert len(load([{**row, "negative": "b"}], task="embedding", pooling="mean").train) == 1

"""The embedded assets: what the first run of every user depends on."""

import json

import pytest

from swiftfp8.config.paths import assets_dir


def questions(name):
    lines = (assets_dir() / "quickstart" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def test_each_question_has_one_answer_so_that_it_can_be_learnt_by_heart():
    train = questions("train")
    assert len(train) == len(set(train))


def test_evaluation_questions_are_not_trained():
    train = set(questions("train"))
    assert not train & set(questions("reworded")) and not train & set(questions("unseen"))


def test_reworded_answers_are_answers_of_the_training_rows():
    def answers(name):
        lines = (assets_dir() / "quickstart" / f"{name}.jsonl").read_text().splitlines()
        return {json.loads(line)["messages"][1]["content"] for line in lines}

    assert answers("reworded") <= answers("train")


def test_assets_are_small_and_carry_their_licence():
    files = [path for path in assets_dir().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 7e6
    licence = (assets_dir() / "quickstart" / "LICENSE-chatterbot-corpus.txt").read_text()
    assert "Gunther Cox" in licence and "Redistribution" in licence


def test_model_loads_and_knows_its_pre_training_text(plain_tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets_dir() / "tiny", dtype=torch.float32)
    assert model.config.eos_token_id == plain_tokenizer.eos_token_id
    assert model.config.pad_token_id == plain_tokenizer.pad_token_id
    assert len(plain_tokenizer) == model.config.vocab_size
    linears = [
        m for n, m in model.named_modules() if type(m) is torch.nn.Linear and "head" not in n
    ]
    assert all(m.in_features % 128 == 0 == m.out_features % 128 for m in linears)
    text = "And it came to pass, that the king of Israel went up to the house of the LORD."
    ids = torch.tensor([plain_tokenizer(text)["input_ids"]])
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 4.0, "an untrained model of 2,048 tokens has 7.6"

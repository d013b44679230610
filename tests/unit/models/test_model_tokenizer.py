"""Tokenizers: padding, templates, and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_dirs import write_tokenizer

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.family import family_named
from swiftfp8.models.source import ModelSource
from swiftfp8.models.tokenizer import load_tokenizer, read_template, require_chat_template

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]


def source(path: Path) -> ModelSource:
    return ModelSource(name="x", path=path, family=family_named("qwen3"), origin=str(path))


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="has no tokenizer"):
        load_tokenizer(source(tmp_path))


def test_an_unreadable_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SwiftFP8Error, match="can't be read"):
        load_tokenizer(source(tmp_path))


def test_its_own_padding_token_is_kept(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, pad_token="<mypad>")
    assert load_tokenizer(source(tmp_path)).pad_token == "<mypad>"


def test_a_padding_token_of_the_vocabulary_is_preferred_to_the_end_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, mask_token="<|finetune_right_pad_id|>")
    assert load_tokenizer(source(tmp_path)).pad_token == "<|finetune_right_pad_id|>"


def test_the_end_token_pads_where_there_is_no_other(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(source(tmp_path))
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("</s>", "right")


def test_no_chat_template_is_an_error_only_where_one_is_needed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(source(tmp_path))
    with pytest.raises(SwiftFP8Error, match="template=gemma"):
        require_chat_template(tokenizer, "gemma")
    require_chat_template(load_tokenizer(source(tmp_path), "chatml"))


def test_a_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(source(tmp_path), str(file))
    assert tokenizer.apply_chat_template(CHAT[1:], tokenize=False) == "[user]Hi[assistant]Hello"


@pytest.mark.parametrize(
    ("name", "rendered", "prompt"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n",
            "<|im_start|>assistant\n",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nBe short.\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nHello<end_of_turn>\n",
            "<start_of_turn>model\n",
        ),
    ],
)
def test_packaged_templates(tmp_path: Path, name: str, rendered: str, prompt: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(source(tmp_path), name)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == rendered
    asked = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert asked + "Hello" == rendered[: len(asked) + 5]
    assert asked.endswith(prompt)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}\n{{ m.", "not valid Jinja"),
        (" \n", "empty"),
        (None, "no chat template file"),
    ],
)
def test_faulty_templates(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "t.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SwiftFP8Error, match=message):
        read_template(str(file))


def test_transformers_generation_tag_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    assert "generation" in read_template(str(file))

from __future__ import annotations

from pathlib import Path

import pytest
from model_dirs import write_tokenizer
from transformers import AutoTokenizer

from swiftfp8.models.tokenizer import read_template
from swiftfp8.models.turns import turn_ends

ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>"}
NEXT_ASKER_ENDS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
WORDS_END = "{% for m in messages %}{{ m.role }}: {{ m.content }} over </s>{% endfor %}"
REFUSES = "{{ raise_exception('no') }}"


def tokenizer_with(folder: Path, special: str, template: str | None):
    write_tokenizer(folder, mask_token=special)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("name", sorted(ENDS))
def test_the_packaged_templates_end_turns_with_a_token_of_their_own(tmp_path, name):
    tokenizer = tokenizer_with(tmp_path, ENDS[name], read_template(name))
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer)) == [ENDS[name]]


def test_the_next_turns_first_token_ends_a_turn_where_nothing_else_does(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "<|user|>", NEXT_ASKER_ENDS)
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer)) == ["<|user|>"]


@pytest.mark.parametrize("template", [None, WORDS_END, REFUSES])
def test_no_token_is_made_up(tmp_path, template):
    assert turn_ends(tokenizer_with(tmp_path, "<|im_end|>", template)) == []

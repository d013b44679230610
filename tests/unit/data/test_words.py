"""Remembered words give what the tokenizer's core gives, or leave it to it."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from test_chat import CHATML, chat
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from swiftfp8.data import chat as stage
from swiftfp8.data.chat import Example, TokenizeSettings, tokenize_rows
from swiftfp8.data.words import SAFE, WordEncoder

# The cuts that most current models use, as regular expressions.
CUTS = {
    "single digits": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "three digits": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "by case": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "three times": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
        "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "GPT-2": (),  # by the byte level's own expression
}
TEXT = """She said it's 1234 o'clock, and they'll go.  def f(x):\n    return [x, 'y']\n\n
Ünïcödé — “quotes” … 你好，世界 привет"""  # noqa: RUF001


def make_core(cut=CUTS["single digits"], *, nfc=True, **changes):
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC() if nfc else None
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(
                pre_tokenizers.Split(Regex(part), changes.get("behavior", "isolated"))
                for part in ([cut] if isinstance(cut, str) else cut)
            ),
            *([] if cut else [pre_tokenizers.Digits(individual_digits=True)]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([TEXT] * 3, trainer)
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    return core


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("nfc", [True, False])
def test_ids_are_the_cores_on_random_text(cut, nfc):
    core = make_core(CUTS[cut], nfc=nfc)
    words = WordEncoder.of(core)
    rng = random.Random(0)
    bits = [
        *TEXT,
        *"  \t\n\r'sS019.([",
        "\n\n",
        "   ",
        "'ll",
        "<|im_end|>",
        "<|im",
        "<tool>",
        "12345",
    ]
    seen = 0
    for _ in range(2_000):
        text = "".join(rng.choices(bits, k=rng.randint(0, 30)))
        found = words.encode(text)
        expected = core.encode(text, add_special_tokens=False)
        assert found.ids.tolist() == expected.ids, text
        spans = sorted(rng.sample(range(len(text) + 1), 2)) if text else []
        ranges = found.token_ranges([tuple(spans)]) if spans else None
        if ranges is not None:
            (ends,) = ranges
            view = stage._View(ids=expected.ids, chars=expected, text=text)
            assert ends == view.token_range(tuple(spans)), (text, spans)
            seen += 1
    assert seen > 200


@pytest.mark.parametrize("cut", ["single digits", "by case", "three times", "GPT-2"])
def test_every_character_that_is_taken_is_cut_as_the_core_cuts_it(cut):
    core = make_core(CUTS[cut])
    words = WordEncoder.of(core)
    taken = [chr(c) for c in range(0x11000) if re.fullmatch(f"[{SAFE}]", chr(c))]
    assert len(taken) > 30_000
    if cut != "single digits":
        taken = taken[::5]
    for form in ("a{}b", " {} ", "{0}{0}", "1{}1", "'{}", "{}\n", "\n{}", " {}\r\n x"):
        texts = [
            "|".join(form.format(c) for c in taken[k : k + 64]) for k in range(0, len(taken), 64)
        ]
        expected = core.encode_batch(texts, add_special_tokens=False)
        for text, encoding in zip(texts, expected, strict=True):
            found = words.encode(text)
            assert found is None or found.ids.tolist() == encoding.ids, (form, text)


@pytest.mark.parametrize(
    "text", ["\x1c", "\x85", "\u00a0", "'\u017f", "e\u0301", "\u200b", "😀", "\0"]
)
def test_other_characters_are_left_to_the_core(text):
    assert WordEncoder.of(make_core()).encode(f"some {text} text") is None


def test_the_embedded_tokenizer_is_taken_and_other_kinds_are_left_to_the_core(tokenizer):
    assert WordEncoder.of(tokenizer.backend_tokenizer) is not None
    assert WordEncoder.of(make_core(behavior="removed")) is None
    lower = make_core()
    lower.normalizer = normalizers.Lowercase()
    assert WordEncoder.of(lower) is None
    stripping = make_core()
    stripping.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert WordEncoder.of(stripping) is None
    dropping = json.loads(make_core().to_str())
    dropping["model"]["dropout"] = 0.1
    assert WordEncoder.of(Tokenizer.from_str(json.dumps(dropping))) is None


def test_rows_and_masks_are_the_same_with_words_and_without(monkeypatch):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=make_core(), eos_token="<|im_end|>", pad_token="<|im_start|>"
    )
    tokenizer.chat_template = CHATML
    rng = random.Random(1)
    parts = [*TEXT.split(" "), "\n", " ", "\n\n", "  x", "😀", "<|im_end|>"]
    examples = []
    for k in range(3_000):
        said = ["x" + " ".join(rng.choices(parts, k=9)), " ".join(rng.choices(parts, k=20)) + "."]
        content = said[1] if k % 5 == 0 else chat(*said * rng.randint(1, 2))
        examples.append(Example(content=content, where=f"file:{k}"))

    def rows():
        settings = TokenizeSettings(max_length=99, truncation="right", system=None, whole=False)
        return [
            p for part in tokenize_rows(examples, tokenizer, settings) for p in part.fitted.pairs
        ]

    used = []
    encode = WordEncoder.encode_batch
    monkeypatch.setattr(
        WordEncoder,
        "encode_batch",
        lambda self, texts: used.extend(encode(self, texts)) or used[len(used) - len(texts) :],
    )
    by_words = rows()
    assert sum(found is not None for found in used) > 1_000
    assert sum(found is None for found in used) > 100
    monkeypatch.setattr(stage.RowEncoder, "look_up", lambda self, b: stage._Encoded.nothing(b))
    by_core = rows()
    for one, two in zip(by_words, by_core, strict=True):
        assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])

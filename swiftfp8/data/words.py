"""Byte-level BPE by remembered words: what a tokenizer's core gives, several times as fast.

Most current tokenizers (Llama 3, Qwen, GPT-4's kind) cut a text with one regular expression into
words, none of which affects another's tokens. Texts repeat words, so a word's tokens are computed
once, by the core itself, and then looked up; the cutting is done by `regex`.

The two regex engines need not agree on every character there is. Texts with characters outside a
set of common scripts on which they do (tests compare them all), with text that is not in NFC, and
tokenizers of any other kind are left to the core: `encode` or `WordEncoder.of` then gives None.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import regex

Span = tuple[int, int]
_REMEMBERED = 500_000  # words; then the memory begins anew
# ASCII, Latin, Greek, Cyrillic, punctuation, currencies, Kana, ideographs, Hangul, full width
SAFE = (
    r"\t\n\r\x20-\x7e\u00a1-\u017e\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u2010-\u2027\u2030-\u205e"
    r"\u20a0-\u20bf\u3001-\u3029\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e"
)
_UNSAFE = re.compile(f"[^{SAFE}]")


@dataclass(frozen=True, kw_only=True)
class Words:
    """A text's ids, and where its words begin: in characters and in tokens, ends included."""

    ids: list[int]
    chars: np.ndarray
    tokens: np.ndarray

    def token_range(self, span: Span) -> Span | None:
        """First and one past the last token of a span; None where its ends lie within words."""
        at = np.searchsorted(self.chars, span)
        if at[1] >= len(self.chars) or (self.chars[at] != span).any():
            return None
        return int(self.tokens[at[0]]), int(self.tokens[at[1]])

    def token_to_chars(self, token: int) -> Span:
        """The characters of the word that this token belongs to."""
        word = int(np.searchsorted(self.tokens, token, side="right")) - 1
        return int(self.chars[word]), int(self.chars[word + 1])


class WordEncoder:
    """Encodes texts without adding special tokens, but finding those that they hold."""

    def __init__(self, core: Any, pattern: str, added: dict[str, int]) -> None:
        self._cut = regex.compile(pattern)
        self._known = _Memory(core)
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._find = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @classmethod
    def of(cls, core: Any) -> WordEncoder | None:
        """For a tokenizer's core (`tokenizers.Tokenizer`), or None where it is of another kind."""
        made = json.loads(core.to_str())
        pattern = _pattern(made)
        added = made["added_tokens"]
        odd = any(t["single_word"] or t["lstrip"] or t["rstrip"] for t in added)
        if pattern is None or odd or not added:
            return None
        return cls(core, pattern, {token["content"]: token["id"] for token in added})

    def encode(self, text: str) -> Words | None:
        """Ids and words, or None where the core has to do it."""
        if _UNSAFE.search(text) or not (text.isascii() or unicodedata.is_normalized("NFC", text)):
            return None
        words: list[str] = []
        found: list[tuple[int, ...]] = []
        for k, part in enumerate(self._find.split(text)):
            if k % 2:
                words.append(part)
                found.append((self._added[part],))
            elif part:
                cut = self._cut.findall(part)
                words += cut
                found += map(self._known.__getitem__, cut)
        chars = _from_zero(words)
        if chars[-1] != len(text):  # the pattern left something out
            return None
        return Words(ids=list(chain.from_iterable(found)), chars=chars, tokens=_from_zero(found))


class _Memory(dict[str, tuple[int, ...]]):
    def __init__(self, core: Any) -> None:
        super().__init__()
        self._core = core

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _REMEMBERED:
            self.clear()
        ids = tuple(self._core.encode(word, add_special_tokens=False).ids)
        self[word] = ids
        return ids


def _pattern(made: dict[str, Any]) -> str | None:
    """The regex that cuts words, where nothing else does and nothing changes the text but NFC."""
    normalizer, before, model = made["normalizer"], made["pre_tokenizer"], made["model"]
    steps = (before or {}).get("pretokenizers", [])
    if model["type"] != "BPE" or model.get("dropout") or len(steps) != 2:
        return None
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return None
    cut, byte_level = steps
    plain = byte_level["type"] == "ByteLevel" and not byte_level["add_prefix_space"]
    after = made["post_processor"] or {}
    if any(step.get("trim_offsets") for step in (after, *after.get("processors", ()))):
        return None  # blanks would belong to no token
    if not plain or byte_level["use_regex"] or cut["type"] != "Split":
        return None
    if cut["behavior"] != "Isolated" or cut["invert"] or "(" in _without_known(cut["pattern"]):
        return None
    return str(cut["pattern"]["Regex"])


def _without_known(pattern: dict[str, str]) -> str:
    """The regex without groups that don't capture; `(` where it is no regex."""
    text = pattern.get("Regex", "(")
    return regex.sub(r"\(\?(i:|:|!)|\\\(", "", text)


def _from_zero(parts: list[Any]) -> np.ndarray:
    sizes = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    return np.concatenate([[0], np.cumsum(sizes)])

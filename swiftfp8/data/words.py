"""Byte-level BPE by remembered words: what a tokenizer's core gives, several times as fast.

Most current tokenizers (Llama 3, Qwen, DeepSeek, GPT's kind) cut a text with regular expressions
into words, none of which affects another's tokens. Texts repeat words, so a word's tokens are
computed once, by the core itself, and then looked up; `cutting.py` does the cutting.

The two regex engines need not agree on every character there is. Texts with characters outside a
set of common scripts on which they do (tests compare them all), with text that is not in NFC, and
tokenizers of any other kind are left to the core: `encode` or `WordEncoder.of` then gives None.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Any

import numpy as np

from swiftfp8.data.cutting import Cutter, can_cut

Span = tuple[int, int]
_REMEMBERED = 500_000  # words; then the memory begins anew
# ASCII, Latin, Greek, Cyrillic, punctuation, currencies, Kana, ideographs, Hangul, full width
SAFE = (
    r"\t\n\r\x20-\x7e\u00a1-\u017e\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u2010-\u2027\u2030-\u205e"
    r"\u20a0-\u20bf\u3001-\u3029\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UNSAFE = re.compile(f"[^{SAFE}]")


@dataclass(frozen=True, kw_only=True)
class Words:
    """A text's ids, and where its words begin: in characters and in tokens, ends included."""

    ids: np.ndarray
    chars: np.ndarray
    tokens: np.ndarray

    def token_ranges(self, spans: Sequence[Span]) -> list[Span] | None:
        """First and one past the last token of each span; None where an end lies within a word."""
        wanted = np.array(spans, dtype=np.int64).reshape(-1, 2)
        at = np.searchsorted(self.chars, wanted)
        if (at >= len(self.chars)).any() or (self.chars[at] != wanted).any():
            return None
        return [(first, last) for first, last in self.tokens[at].tolist()]

    def token_to_chars(self, token: int) -> Span:
        """The characters of the word that this token belongs to."""
        word = int(np.searchsorted(self.tokens, token, side="right")) - 1
        return int(self.chars[word]), int(self.chars[word + 1])


class WordEncoder:
    """Encodes texts without adding special tokens, but finding those that they hold."""

    def __init__(self, core: Any, patterns: Sequence[str], added: dict[str, int]) -> None:
        self._cut = Cutter(patterns, SAFE)
        self._known = _Memory(core, added)
        longest_first = sorted(added, key=len, reverse=True)
        self._find = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self.around = _around(core)

    @classmethod
    def of(cls, core: Any) -> WordEncoder | None:
        """For a tokenizer's core (`tokenizers.Tokenizer`), or None where it is of another kind."""
        patterns = _patterns(core)
        added = core.get_added_tokens_decoder()
        odd = any(t.single_word or t.lstrip or t.rstrip for t in added.values())
        if patterns is None or odd or not added:
            return None
        return cls(core, patterns, {token.content: index for index, token in added.items()})

    def encode(self, text: str) -> Words | None:
        """Ids and words, or None where the core has to do it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Words | None]:
        """`encode` of each text: words that are new are sent to the core together."""
        cuts = [self._words(text) for text in texts]
        made = iter(self._known.look_up([cut for cut in cuts if cut is not None]))
        return [None if cut is None else next(made) for cut in cuts]

    def _words(self, text: str) -> list[str] | None:
        plain = text.isascii()
        if _UNSAFE.search(text) or not (plain or unicodedata.is_normalized("NFC", text)):
            return None
        cut = self._cut.ascii if plain else self._cut.any
        words: list[str] = []
        for k, part in enumerate(self._find.split(text)):
            if k % 2:
                words.append(part)
            elif part:
                words += cut(part)
        # unequal where the pattern left something out
        return words if sum(map(len, words)) == len(text) else None


class _Memory:
    """Words by number, and each number's tokens: looked up with arrays, thousands at once."""

    def __init__(self, core: Any, added: Mapping[str, int]) -> None:
        self._core = core
        self._added = added
        self._begin()

    def look_up(self, cuts: Sequence[list[str]]) -> list[Words]:
        """Tokens of texts that are cut into words."""
        if not cuts:
            return []
        if len(self._numbers) >= _REMEMBERED:
            self._begin()
        words = list(chain.from_iterable(cuts))
        numbers = np.fromiter(
            map(self._numbers.get, words, repeat(-1)), dtype=np.int64, count=len(words)
        )
        new = np.flatnonzero(numbers < 0)
        if len(new):
            missing = [words[k] for k in new.tolist()]
            self._learn(list(dict.fromkeys(missing)))
            numbers[new] = [self._numbers[word] for word in missing]
        sizes = self._sizes[numbers]
        ids = self._ids[_ranges(self._starts[numbers], sizes)]
        chars, tokens = _from_zero(self._chars[numbers]), _from_zero(sizes)
        made, at = [], 0
        for cut in cuts:
            end = at + len(cut)
            first, last = tokens[at], tokens[end]
            made.append(
                Words(
                    ids=ids[first:last],
                    chars=chars[at : end + 1] - chars[at],
                    tokens=tokens[at : end + 1] - first,
                )
            )
            at = end
        return made

    def _begin(self) -> None:
        """Remember the added tokens alone, which no text's words can equal."""
        self._numbers: dict[str, int] = {}
        self._ids = np.empty(0, dtype=np.int32)
        self._starts = self._sizes = self._chars = np.empty(0, dtype=np.int64)
        self._add(list(self._added), [[index] for index in self._added.values()])

    def _learn(self, words: list[str]) -> None:
        encoded = self._core.encode_batch_fast(words, add_special_tokens=False)
        self._add(words, [encoding.ids for encoding in encoded])

    def _add(self, words: list[str], ids: list[list[int]]) -> None:
        sizes = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(sizes.sum()))
        starts = len(self._ids) + np.cumsum(sizes) - sizes
        chars = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        self._numbers.update(zip(words, count(len(self._numbers)), strict=False))
        self._ids = np.concatenate([self._ids, flat])
        self._starts = np.concatenate([self._starts, starts])
        self._sizes = np.concatenate([self._sizes, sizes])
        self._chars = np.concatenate([self._chars, chars])


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`starts[0], starts[0] + 1, ...`, as many as `sizes[0]`, then those of the next."""
    begins = np.cumsum(sizes) - sizes
    return np.repeat(starts - begins, sizes) + np.arange(sizes.sum(), dtype=np.int64)


def _around(core: Any) -> tuple[list[int], list[int]] | None:
    """The special tokens that the core puts before and after any text, where they are fixed."""
    found = []
    for probe in ("a", "b c"):
        bare = core.encode(probe, add_special_tokens=False).ids
        full = core.encode(probe, add_special_tokens=True).ids
        at = next((k for k in range(len(full)) if full[k : k + len(bare)] == bare), None)
        if at is None:
            return None
        found.append((full[:at], full[at + len(bare) :]))
    return found[0] if found[0] == found[1] else None


def _patterns(core: Any) -> list[str] | None:
    """The regexes that cut words, where nothing else does and nothing changes the text but NFC."""
    normalizer, before, after = map(
        _described, (core.normalizer, core.pre_tokenizer, core.post_processor)
    )
    steps = before.get("pretokenizers", [before])
    if type(core.model).__name__ != "BPE" or core.model.dropout:
        return None
    if normalizer not in ({}, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}):
        return None
    if any(step.get("trim_offsets") for step in (after, *after.get("processors", ()))):
        return None  # blanks would belong to no token
    *cuts, byte_level = steps
    if byte_level.get("type") != "ByteLevel" or byte_level["add_prefix_space"]:
        return None
    patterns = [_pattern(cut) for cut in cuts]
    if byte_level["use_regex"]:
        patterns.append(_GPT2)
    return [p for p in patterns if p] if patterns and all(patterns) else None


def _pattern(cut: dict[str, Any]) -> str | None:
    """The regex whose matches this step makes words, or None where it does something else."""
    if cut["type"] == "Digits":
        return r"\p{N}" if cut["individual_digits"] else r"\p{N}+"
    if cut["type"] != "Split" or cut["behavior"] != "Isolated" or cut["invert"]:
        return None
    pattern = cut["pattern"].get("Regex")
    return pattern if pattern and can_cut(pattern) else None


def _described(part: Any) -> dict[str, Any]:
    """A part of the core as tokenizer.json has it; the whole file would hold the vocabulary too."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _from_zero(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)])

r"""Cutting text into words by a tokenizer's regular expressions.

They are written for other engines (`\p{L}` and the like). Python's own knows no such classes but is
twice as fast as the `regex` package, so each class is spelled out for the characters that texts may
have here; an expression that can't be spelled out is left to `regex`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

import regex

Cut = Callable[[str], list[str]]
_ASCII = r"\x00-\x7f"


class Cutter:
    """Cuts texts by expressions, each within the pieces of the one before.

    `ascii` takes texts of ASCII only, `any` all of the characters that `safe`, the inside of a
    class, names. What a single expression leaves out is lost, which the caller checks; of several,
    it is a piece as well.
    """

    def __init__(self, patterns: Sequence[str], safe: str) -> None:
        self._patterns, self._safe = patterns, safe
        self.ascii = _cut_by(patterns, _ASCII)

    @cached_property
    def any(self) -> Cut:
        """Made when first needed: it takes a moment, and many data sets never do."""
        return _cut_by(self._patterns, self._safe)


def can_cut(pattern: str) -> bool:
    """Whether the expression is one that `Cutter` takes: known here, and without groups."""
    try:
        return bool(regex.compile(pattern).groups == 0)
    except regex.error:
        return False


def _cut_by(patterns: Sequence[str], safe: str) -> Cut:
    compiled = [_compile(pattern, safe) for pattern in patterns]
    if len(compiled) == 1:
        return compiled[0].findall
    splits = [_compile(f"({one.pattern})", None).split for one in compiled]

    def cut(text: str) -> list[str]:
        pieces = [text]
        for split in splits:
            pieces = [part for piece in pieces for part in split(piece) if part]
        return pieces

    return cut


def _compile(pattern: str, safe: str | None) -> re.Pattern[str]:
    try:
        return re.compile(pattern if safe is None else _spelled(pattern, safe))
    except (re.error, ValueError):
        compiled: re.Pattern[str] = regex.compile(pattern)
        return compiled


def _spelled(pattern: str, safe: str) -> str:
    r"""The expression with `\p{..}`, `\s` and `\S` spelled out; ValueError where it has others."""
    made: list[str] = []
    opened = None  # where a class in brackets begins in `made`
    for token in re.findall(r"\\p\{\w+\}|\\.|\[\^?|.", pattern, flags=re.S):
        inside = opened is not None
        if token.startswith("[") and not inside:
            opened = len(made)
            made.append(token)
        elif token == "]" and inside:
            if "".join(made[opened:]) in ("[", "[^"):
                raise ValueError("an empty class")
            opened = None
            made.append(token)
        elif token.startswith(r"\p"):
            kind = _ranges(safe, token[3:-1])
            made.append(kind if inside else f"[{kind}]" if kind else "(?!)")
        elif token in (r"\s", r"\S"):
            other, blank = token == r"\S", _ranges(safe, None)
            if other and inside:
                raise ValueError("a class that can't be spelled out")
            made.append(blank if inside else f"[{'^' if other else ''}{blank}]")
        elif token[0] == "\\" and token[1:].isalpha() and token[1:] not in "rnt":
            raise ValueError("a class that can't be spelled out")
        else:
            made.append(token)
    return "".join(made)


@lru_cache(maxsize=256)
def _ranges(safe: str, kind: str | None) -> str:
    """The inside of a class: characters of `safe` of a Unicode category, or its blanks."""
    known = _characters(safe)
    if kind is None:
        chosen = regex.findall(r"\s", "".join(known))
    else:
        chosen = [c for c in known if unicodedata.category(c).startswith(kind)]
    spans: list[list[int]] = []
    for code in map(ord, chosen):
        if spans and spans[-1][1] == code - 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return "".join(f"\\u{a:04x}-\\u{b:04x}" for a, b in spans)


@lru_cache(maxsize=8)
def _characters(safe: str) -> tuple[str, ...]:
    inside = re.compile(f"[{safe}]")
    return tuple(c for c in map(chr, range(0x10000)) if inside.match(c))

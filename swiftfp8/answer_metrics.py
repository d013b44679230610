"""How near an answer is to the one that was wanted: figures of one pair of texts, 0 to 1.

`exact_match`: equal but for blanks. `contains`: the wanted text stands in the answer. ROUGE (Lin
2004) is the F-measure of words (`rouge1`), of pairs of words (`rouge2`) and of the longest common
subsequence (`rougeL`), without stemming. Words are lower-case runs of letters and digits; a Chinese
or Japanese character and a Korean syllable is a word by itself. Reasoning in `<think>` is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

METRICS = ("exact_match", "contains", "rouge1", "rouge2", "rougeL")
_WIDE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_WIDE}]|[^\W_{_WIDE}]+")
_THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


def compare_answers(answer: str, wanted: str) -> dict[str, float]:
    """The `METRICS` of an answer. Of a text without words ROUGE is 0, or 1 where both have none."""
    said, asked = plain_answer(answer), plain_answer(wanted)
    words, wanted_words = _words(said), _words(asked)
    return {
        "exact_match": float(said == asked),
        "contains": float(asked in said),
        "rouge1": _overlap(words, wanted_words, 1),
        "rouge2": _overlap(words, wanted_words, 2),
        "rougeL": _f1(_common(words, wanted_words), len(words), len(wanted_words)),
    }


def plain_answer(text: str) -> str:
    """Without its reasoning, with single blanks."""
    return " ".join(_THOUGHT.sub(" ", text).split())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _overlap(words: Sequence[str], wanted: Sequence[str], size: int) -> float:
    """F-measure of runs of `size` words; of texts that are both shorter, whether they are equal."""
    if max(len(words), len(wanted)) < size:
        return float(list(words) == list(wanted))
    found, asked = _runs(words, size), _runs(wanted, size)
    return _f1((found & asked).total(), found.total(), asked.total())


def _runs(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[k : k + size]) for k in range(len(words) - size + 1))


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for k, other in enumerate(second, start=1):
            above = row[k]
            row[k] = diagonal + 1 if word == other else max(above, row[k - 1])
            diagonal = above
    return row[-1]


def _f1(common: int, found: int, wanted: int) -> float:
    if not found and not wanted:
        return 1.0
    return 2 * common / (found + wanted)

"""How much tokens count in the loss, by who says them and what (`data.loss_weights`).

An answer is weighed as `assistant`, its reasoning and its tool calls by their own keys, and answers
before the user's last turn `history` times as much. What the user, the system and tools say has the
weight `prompt`, where it is trained at all.

Reasoning is what stands up to the first `</think>`, or up to the end of `reasoning_content` in a
template that writes no such mark. Tool calls of a row's own field are all that the template writes
after the words of the answer; those within the words are the text from `<tool_call>` to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swiftfp8.data.formats import BadRow, Message
from swiftfp8.data.spans import Span

_END_OF_REASONING = "</think>"
_CALL = re.compile(r"<tool_call>.*?</tool_call>", flags=re.S)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Characters of a rendered conversation and their weight; a later part lies within one before.

    `whole`: an answer, of which the parts that follow are pieces.
    """

    span: Span
    weight: float
    whole: bool = False


def weigh_answers(
    messages: Sequence[Message], text: str, spans: Sequence[Span], weights: Mapping[str, float]
) -> list[Part]:
    """Each answer of `text`, whose `spans` they are, and the pieces of it that differ.

    Raises:
        BadRow: there are more answers, or fewer, than spans.
    """
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if len(answers) != len(spans):
        raise BadRow(
            f"the chat template marks {len(spans)} of {len(answers)} answers, so data.loss_weights "
            "can't tell which they are"
        )
    asked = max(k for k, message in enumerate(messages) if message["role"] == "user")
    parts: list[Part] = []
    for k, span in zip(answers, spans, strict=True):
        share = weights.get("history", 1.0) if k < asked else 1.0
        usual = weights.get("assistant", 1.0)
        parts.append(Part(span=span, weight=usual * share, whole=True))
        for name, piece in _pieces(messages[k], text, span):
            if name in weights and text[slice(*piece)].strip():
                parts.append(Part(span=piece, weight=weights[name] * share))
    return parts


def _pieces(said: Message, text: str, span: Span) -> Iterator[tuple[str, Span]]:
    start, end = span
    thought = _end_of_reasoning(said, text, start, end)
    yield "reasoning", (start, thought)
    if "tool_calls" not in said:
        yield from (("tool_call", call.span()) for call in _CALL.finditer(text, thought, end))
        return
    words = said["content"].split(_END_OF_REASONING)[-1].strip()
    at = text.find(words, thought, end) if words else -1
    yield "tool_call", (thought if at < 0 else at + len(words), end)


def _end_of_reasoning(said: Message, text: str, start: int, end: int) -> int:
    at = text.find(_END_OF_REASONING, start, end)
    if at >= 0:
        return at + len(_END_OF_REASONING)
    thought = said.get("reasoning_content", "").strip()
    at = text.find(thought, start, end) if thought else -1
    return start if at < 0 else at + len(thought)

"""Where the assistant's words lie in a rendered conversation, for any chat template.

A template is a program, and no list of known ones is complete. So it is asked: a conversation
whose contents are markers gives the template's own text around each content, its skeleton,

    <|im_start|>user\\n ⟨0⟩ <|im_end|>\\n<|im_start|>assistant\\n ⟨1⟩ <|im_end|>\\n

which depends on the roles alone. The contents put between its pieces must give exactly what the
template renders from the real conversation (or the contents without blanks at their ends, as many
templates trim them): then every span is known.

Where it doesn't, the template looks into the contents (Qwen3 drops the reasoning of earlier turns
and adds an empty one to the last). Then each assistant turn alone is replaced by a marker: what
stands before and after the marker must also stand before and after the turn in the real text, and
what is between is the turn as the model would say it. A turn with reasoning gets a marker with
reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiftfp8.data.formats import BadRow, Message

Span = tuple[int, int]
Render = Callable[[list[Message]], str]

_OPEN, _CLOSE = "qzk0mark", "qzk9mark"
_END_OF_REASONING = "</think>"


@dataclass(frozen=True)
class _Skeleton:
    """The template's text around contents: `pieces[k]` stands before content k."""

    pieces: tuple[str, ...]
    order: tuple[int, ...]


class SpanFinder:
    """Finds assistant spans in rendered text; remembers the skeleton of each order of roles."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._skeletons: dict[tuple[str, ...], _Skeleton | None] = {}

    def find(self, messages: list[Message], rendered: str) -> list[Span]:
        """Character spans of the assistant's turns in `rendered`, the turns' rendering.

        Raises:
            BadRow: the template renders the turns in a way that hides where they are.
        """
        skeleton = self._skeleton(messages)
        if skeleton is not None:
            for contents in (
                [message["content"] for message in messages],
                [message["content"].strip() for message in messages],
            ):
                spans = _assemble(skeleton, messages, contents, rendered)
                if spans is not None:
                    return spans
        return [
            self._one_turn(messages, turn, rendered)
            for turn, message in enumerate(messages)
            if message["role"] == "assistant"
        ]

    def _skeleton(self, messages: Sequence[Message]) -> _Skeleton | None:
        roles = tuple(message["role"] for message in messages)
        if roles not in self._skeletons:
            self._skeletons[roles] = self._learn(roles)
        return self._skeletons[roles]

    def _learn(self, roles: tuple[str, ...]) -> _Skeleton | None:
        marks = [f"{_OPEN}{k:04d}{_CLOSE}" for k in range(len(roles))]
        text = self._render(
            [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        )
        places = [text.find(mark) for mark in marks]
        if min(places) < 0 or any(text.count(mark) != 1 for mark in marks):
            return None
        order = tuple(sorted(range(len(marks)), key=places.__getitem__))
        pieces, at = [], 0
        for k in order:
            pieces.append(text[at : places[k]])
            at = places[k] + len(marks[k])
        return _Skeleton(pieces=(*pieces, text[at:]), order=order)

    def _one_turn(self, messages: list[Message], turn: int, rendered: str) -> Span:
        plain = f"{_OPEN}{_CLOSE}"
        reasoned = f"<think>\n{_OPEN}\n{_END_OF_REASONING}\n\n{_CLOSE}"
        marks = [plain, reasoned] if _END_OF_REASONING in messages[turn]["content"] else [plain]
        for mark in marks:
            marked = [*messages]
            marked[turn] = {"role": "assistant", "content": mark}
            text = self._render(marked)
            start, end = text.find(mark), text.find(mark) + len(mark)
            before, after = text[: max(start, 0)], text[end:]
            fits = start >= 0 and len(before) + len(after) < len(rendered)
            if fits and rendered.startswith(before) and rendered.endswith(after):
                return len(before), len(rendered) - len(after)
        raise BadRow(f"turn {turn + 1} can't be found in what the chat template makes of the row")


def _assemble(
    skeleton: _Skeleton, messages: Sequence[Message], contents: Sequence[str], rendered: str
) -> list[Span] | None:
    """The assistant's spans where skeleton and contents give `rendered` exactly, else None."""
    at, spans = 0, []
    for piece, k in zip(skeleton.pieces, skeleton.order, strict=False):
        start = at + len(piece)
        end = start + len(contents[k])
        if rendered[at:start] != piece or rendered[start:end] != contents[k]:
            return None
        if messages[k]["role"] == "assistant":
            spans.append((start, end))
        at = end
    return spans if rendered[at:] == skeleton.pieces[-1] else None

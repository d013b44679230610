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

A turn with reasoning or tool calls in fields of their own is compared with one whose fields are
markers. The texts part somewhere within the turn; it begins after the last words before that place
with which the template asks for an answer (`add_generation_prompt`), since what follows those is
the model's own. It ends where the marked one ends, or, after tool calls, at the first special token
of what the texts share at their ends.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

from swiftfp8.data.formats import BadRow, Message

Span = tuple[int, int]
Tools = list[Any] | None

_OPEN, _CLOSE = "qzk0mark", "qzk9mark"
_END_OF_REASONING = "</think>"


class Render(Protocol):
    """A template: conversation and tools to text; with `ask` up to where an answer begins."""

    def __call__(self, messages: list[Message], tools: Tools = None, *, ask: bool = False) -> str:
        """The text."""


@dataclass(frozen=True)
class _Skeleton:
    """The template's text around contents: `pieces[k]` stands before content k."""

    pieces: tuple[str, ...]
    order: tuple[int, ...]


class SpanFinder:
    """Finds assistant spans in rendered text; remembers the skeleton of each order of roles."""

    def __init__(self, render: Render, special_tokens: Sequence[str] = ()) -> None:
        self._render = render
        self._special = tuple(special_tokens)
        self._skeletons: dict[tuple[str, ...], _Skeleton | None] = {}

    def find(self, messages: list[Message], rendered: str, tools: Tools = None) -> list[Span]:
        """Character spans of the assistant's turns in `rendered`, the turns' rendering.

        Raises:
            BadRow: the template renders the turns in a way that hides where they are.
        """
        if tools is None and all(len(message) == 2 for message in messages):
            skeleton = self._skeleton(messages)
            spans = None if skeleton is None else _assemble(skeleton, messages, rendered)
            if spans is not None:
                return spans
        found = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._one_turn(messages, turn, rendered, tools)
                _require_calls(message, rendered[start:end], turn)
                found.append((start, end))
        return found

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

    def _one_turn(self, messages: list[Message], turn: int, rendered: str, tools: Tools) -> Span:
        said = messages[turn]
        plain = f"{_OPEN}{_CLOSE}"
        reasoned = f"<think>\n{_OPEN}\n{_END_OF_REASONING}\n\n{_CLOSE}"
        for mark in [plain, reasoned] if _END_OF_REASONING in said["content"] else [plain]:
            text = self._with_turn(messages, turn, {"content": mark}, tools)
            start = text.find(mark)
            before, after = text[: max(start, 0)], text[start + len(mark) :]
            fits = start >= 0 and len(before) + len(after) < len(rendered)
            if fits and rendered.startswith(before) and rendered.endswith(after):
                return len(before), len(rendered) - len(after)
        if len(said) > 2:
            span = self._turn_of_fields(messages, turn, rendered, tools)
            if span is not None:
                return span
        raise BadRow(f"turn {turn + 1} can't be found in what the chat template makes of the row")

    def _turn_of_fields(
        self, messages: list[Message], turn: int, rendered: str, tools: Tools
    ) -> Span | None:
        said = messages[turn]
        marked: Message = {**said, "content": _CLOSE}
        if "reasoning_content" in said:
            marked["reasoning_content"] = _OPEN
        if "tool_calls" in said:
            marked["tool_calls"] = [_marked_call(call) for call in said["tool_calls"]]
        text = self._with_turn(messages, turn, marked, tools)
        if not text:
            return None
        start = self._begin(messages[:turn], tools, rendered, text)
        if "tool_calls" not in said:
            after = text[text.find(_CLOSE) + len(_CLOSE) :]
            end = len(rendered) - len(after)
            return (start, end) if _CLOSE in text and rendered.endswith(after) else None
        shared = _shared(text[::-1], rendered[::-1])
        end = min(self._specials_from(rendered, max(start, len(rendered) - shared)), default=None)
        return None if end is None else (start, end)

    def _with_turn(self, messages: list[Message], turn: int, said: Message, tools: Tools) -> str:
        """The conversation with another turn in this place; nothing where the template refuses."""
        changed = [*messages]
        changed[turn] = {"role": "assistant", **said}
        try:
            return self._render(changed, tools)
        except TemplateError:
            return ""

    def _begin(self, before: list[Message], tools: Tools, rendered: str, marked: str) -> int:
        """Where the model begins its turn: after the words with which the template asks for it.

        Those end the conversation so far; where the template rendered that differently then, they
        are looked for before the place where the two texts part.
        """
        parted = _shared(marked, rendered)
        try:
            asked = self._render(before, tools, ask=True)
            asking = asked.removeprefix(self._render(before, tools))
        except TemplateError:
            return parted
        if rendered.startswith(asked):
            return len(asked)
        at = rendered.rfind(asking, 0, parted) if asking else -1
        return parted if at < 0 else at + len(asking)

    def _specials_from(self, text: str, start: int) -> Iterator[int]:
        return (at for token in self._special if (at := text.find(token, start)) >= 0)


def _require_calls(message: Message, said: str, turn: int) -> None:
    """Older templates know no tools and leave calls out without a word."""
    for call in message.get("tool_calls", ()):
        if call.get("function", call)["name"] not in said:
            raise BadRow(f"the chat template leaves out a tool call of turn {turn + 1}")


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 (characters are meant)


def _marked_call(call: Any) -> Any:
    """A call like this one, to no function that could be meant."""
    called = call.get("function", call)
    marked = {**called, "name": _OPEN, "arguments": {_OPEN: _CLOSE}}
    return {**call, "function": marked} if "function" in call else marked


def _assemble(skeleton: _Skeleton, messages: Sequence[Message], rendered: str) -> list[Span] | None:
    """The assistant's spans where skeleton and contents give `rendered` exactly, else None.

    Contents count without the blanks or line breaks at their ends too, as templates trim them.
    """
    if not rendered.startswith(skeleton.pieces[0]):
        return None
    at, spans = len(skeleton.pieces[0]), []
    for piece, k in zip(skeleton.pieces[1:], skeleton.order, strict=True):
        end = next(_ends(messages[k]["content"], rendered, at, piece), None)
        if end is None:
            return None
        if messages[k]["role"] == "assistant":
            spans.append((at, end))
        at = end + len(piece)
    return spans if at == len(rendered) else None


def _ends(content: str, rendered: str, at: int, piece: str) -> Iterator[int]:
    """Where the content ends if it stands at `at`, whole or trimmed, and `piece` after it."""
    forms: tuple[Callable[[], str], ...] = (
        lambda: content,
        content.strip,
        lambda: content.strip("\n"),
        lambda: content.lstrip("\n"),
        content.lstrip,
        content.rstrip,
    )
    for form in forms:
        text = form()
        end = at + len(text)
        if rendered.startswith(text, at) and rendered.startswith(piece, end):
            yield end

"""Row formats of the tasks that learn something else than an answer's words.

As in `formats.py` a format is found from the columns of the first row and says why it was taken.
Preferences come in three layouts: TRL's (`prompt`, `chosen`, `rejected`), LLaMA-Factory's (an
Alpaca or ShareGPT row with `chosen` and `rejected` in place of the answer) and ms-swift's
(`messages` with the chosen answer, and `rejected_response`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swiftfp8.data.files import shorten
from swiftfp8.data.formats import (
    FORMATS,
    BadRow,
    Content,
    Format,
    Message,
    Row,
    check_turns,
    decoded,
    read_question,
    read_turn,
    require_text,
)


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """A text, or a conversation, with its label: one value, or a list of those that apply."""

    content: Content
    label: str | int | float | bool | tuple[str | int | bool, ...]


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Two ways to go on after `prompt`; each ends with the assistant's turn."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]


@dataclass(frozen=True, kw_only=True)
class Rated:
    """One way to go on after `prompt`, with a thumb up (True) or down."""

    prompt: list[Message]
    completion: list[Message]
    good: bool


@dataclass(frozen=True, kw_only=True)
class Related:
    """A text, one that belongs to it, and some that don't."""

    anchor: str
    positive: str
    negatives: tuple[str, ...]


_TURNS = ("messages", "conversations", "conversation")
_TEXTS = ("text", "sentence", "content", "document", "review")
_LABELS = ("label", "labels", "category", "class")
_REJECTED = ("rejected_response", "rejected_messages")
_RATINGS = ("label", "kto_tag")
_COMPLETIONS = ("completion", "response", "output", "answer")
_ANCHORS = ("anchor", "query", "question", "sentence1")
_POSITIVES = ("positive", "pos", "answer", "sentence2")
_NEGATIVES = ("negative", "negatives", "neg")


def task_formats(names: Sequence[str]) -> tuple[Format, ...]:
    """The formats of these names, in their order."""
    known = {form.name: form for form in (*FORMATS, *TASK_FORMATS)}
    return tuple(known[name] for name in names)


def _detect_label(row: Row) -> str | None:
    content, label = _first(row, (*_TURNS, *_TEXTS)), _first(row, _LABELS)
    return f"columns '{content}' and '{label}'" if content and label else None


def _convert_label(row: Row) -> Labelled:
    name, column = _first(row, (*_TURNS, *_TEXTS)), _first(row, _LABELS)
    if name is None:
        raise BadRow("no text")
    if column is None:
        raise BadRow("no label")
    label = _label(decoded(row[column]), column)
    turns = decoded(row[name])
    if name in _TURNS and not isinstance(turns, str):
        return Labelled(content=_conversation(turns, name), label=label)
    return Labelled(content=require_text(row[name], name), label=label)


def _label(value: Any, name: str) -> Any:
    if isinstance(value, list):
        if not all(isinstance(item, str | int | bool) for item in value):
            raise BadRow(f"{name} lists something else than names: {shorten(repr(value), 40)}")
        return tuple(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRow(f"no {name}")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRow(f"{name} is not a finite number")
    if not isinstance(value, str | int | float):
        raise BadRow(f"{name} is neither a name, a number nor a list: {shorten(repr(value), 40)}")
    return value.strip() if isinstance(value, str) else value


def _detect_preference(row: Row) -> str | None:
    asked = _asks(row)
    if "chosen" in row and "rejected" in row:
        if asked:
            return f"columns '{asked}', 'chosen' and 'rejected'"
        both = (decoded(row["chosen"]), decoded(row["rejected"]))
        if all(isinstance(turns, list) for turns in both):
            return "columns 'chosen' and 'rejected' list whole conversations"
        return None
    rejected = _first(row, _REJECTED)
    if rejected and asked in _TURNS:
        return f"column '{asked}' ends with the chosen answer, '{rejected}' is the other"
    return None


def _convert_preference(row: Row) -> Preference:
    rejected = _first(row, _REJECTED)
    if "chosen" in row or rejected is None:
        prompt = _prompt(row)
        chosen = _answer(row.get("chosen"), "chosen", prompt)
        other = _answer(row.get("rejected"), "rejected", prompt)
        if prompt is None:
            prompt, chosen, other = _split_prompt(chosen, other)
    else:
        column = _first(row, _TURNS)
        if column is None:
            raise BadRow("no 'messages'")
        whole = _with_system(row, _conversation(decoded(row[column]), column))
        prompt, chosen = whole[:-1], whole[-1:]
        other = _answer(row[rejected], rejected, prompt)
    for answer in (chosen, other):
        check_turns([*prompt, *answer])
    if chosen == other:
        raise BadRow("chosen and rejected are the same answer")
    return Preference(prompt=prompt, chosen=chosen, rejected=other)


def _split_prompt(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """The turns that both conversations begin with, and what follows in each."""
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    if not same:
        raise BadRow("chosen and rejected have no prompt, and no turn in common")
    return chosen[:same], chosen[same:], rejected[same:]


def _detect_kto(row: Row) -> str | None:
    rating, asked = _first(row, _RATINGS), _asks(row)
    if not rating or not asked or "chosen" in row:
        return None
    if asked in _TURNS:
        return f"column '{asked}' ends with the answer that '{rating}' rates"
    completion = _first(row, _COMPLETIONS)
    return f"columns '{asked}', '{completion}' and '{rating}'" if completion else None


def _convert_kto(row: Row) -> Rated:
    rating = _first(row, _RATINGS)
    if rating is None:
        raise BadRow("no 'label'")
    good = _truth(row[rating], rating)
    completion = _first(row, _COMPLETIONS)
    prompt = _prompt(row)
    if prompt is None:
        raise BadRow("no 'prompt'")
    if completion is not None:
        answer = _answer(row[completion], completion, prompt)
    else:
        prompt, answer = prompt[:-1], prompt[-1:]
    check_turns([*prompt, *answer])
    return Rated(prompt=prompt, completion=answer, good=good)


def _truth(value: Any, name: str) -> bool:
    said = {"true": True, "false": False, "1": True, "0": False}.get(str(value).strip().lower())
    if said is None:
        raise BadRow(f"{name} is neither true nor false: {shorten(repr(value), 40)}")
    return said


def _detect_embedding(row: Row) -> str | None:
    anchor, positive = _first(row, _ANCHORS), _first(row, _POSITIVES)
    if not anchor or not positive:
        return None
    negative = _first(row, _NEGATIVES)
    more = f", negatives in '{negative}'" if negative else ""
    return f"columns '{anchor}' and '{positive}'{more}"


def _convert_embedding(row: Row) -> Related:
    anchor, positive = _first(row, _ANCHORS), _first(row, _POSITIVES)
    if anchor is None or positive is None:
        raise BadRow(f"no {'anchor' if anchor is None else 'positive'}")
    column = _first(row, _NEGATIVES)
    negatives = decoded(row[column]) if column else None
    negatives = [negatives] if isinstance(negatives, str) else negatives or []
    if not isinstance(negatives, list):
        raise BadRow(f"{column} is neither a text nor a list of texts")
    right = decoded(row[positive])
    if isinstance(right, list) and len(right) == 1:
        right = right[0]
    return Related(
        anchor=require_text(row[anchor], anchor),
        positive=require_text(right, positive),
        negatives=tuple(require_text(text, str(column)) for text in negatives),
    )


TASK_FORMATS = (
    Format(
        name="label",
        needs="text or messages, and label: a name, a number, or a list of names",
        detect=_detect_label,
        convert=_convert_label,
    ),
    Format(
        name="preference",
        needs="prompt (or instruction, messages, conversations), chosen, rejected",
        detect=_detect_preference,
        convert=_convert_preference,
    ),
    Format(
        name="kto",
        needs="prompt (or instruction), completion, label: true or false",
        detect=_detect_kto,
        convert=_convert_kto,
    ),
    Format(
        name="embedding",
        needs="anchor (or query), positive; optional negative",
        detect=_detect_embedding,
        convert=_convert_embedding,
    ),
)


def _first(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if row.get(name) is not None), None)


def _asks(row: Row) -> str | None:
    """The column that holds the prompt."""
    return _first(row, ("prompt", *_TURNS, "instruction", "query", "question"))


def _prompt(row: Row) -> list[Message] | None:
    """The turns before the answer; None where the row keeps them in its answers."""
    column = _asks(row)
    turns = decoded(row.get(column)) if column in ("prompt", *_TURNS) else None
    if isinstance(turns, list):
        return _with_system(row, [read_turn(turn, k) for k, turn in enumerate(turns, start=1)])
    asked = read_question(row)
    if column is not None:
        require_text(row[column] if asked is None else asked[-1]["content"], column)
    return asked


def _answer(value: Any, name: str, prompt: list[Message] | None) -> list[Message]:
    """A text, a turn or turns, without the prompt where they begin with it."""
    value = decoded(value)
    if isinstance(value, str) or value is None:
        return [{"role": "assistant", "content": require_text(value, name)}]
    turns = value if isinstance(value, list) else [value]
    if not turns:
        raise BadRow(f"{name} is empty")
    messages = [read_turn(turn, k) for k, turn in enumerate(turns, start=1)]
    if prompt and messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if not messages:
        raise BadRow(f"{name} holds no answer")
    return messages


def _conversation(turns: Any, name: str) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"'{name}' is not a list of turns")
    return [read_turn(turn, k) for k, turn in enumerate(turns, start=1)]


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    system = row.get("system")
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": require_text(system, "system")}, *messages]

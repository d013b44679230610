"""Row formats: how the columns of a row become turns of a conversation, or plain text.

A format is found from the columns of the first row, and says why it was taken. To add one, write
its `detect` and `convert` and list it in `FORMATS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftfp8.data.files import shorten
from swiftfp8.errors import SwiftFP8Error

Row = Mapping[str, Any]
Message = dict[str, Any]  # role and content; an answer may have reasoning_content and tool_calls
Content = list[Message] | str


class BadRow(ValueError):
    """A row that can't be trained on; its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """`detect` gives the reason why a row has this format, or None; `convert` raises BadRow."""

    name: str
    needs: str
    detect: Callable[[Row], str | None]
    convert: Callable[[Row], Any]  # Content, or what data/task_formats.py names


def choose_format(
    row: Row, asked: str, *, where: str, formats: Sequence[Format] | None = None, task: str = "sft"
) -> tuple[Format, str]:
    """The format of the rows that begin with `row`, and why: asked for, or found from columns.

    `formats` are those that the task reads, all that make conversations where left out.
    """
    formats = FORMATS if formats is None else formats
    known = {form.name: form for form in formats}
    if asked in known:
        return known[asked], "asked for"
    if asked != "auto":
        raise SwiftFP8Error(
            f"rows of the format {asked} are nothing that task={task} can learn from",
            where=where,
            fix=f"task={task} reads: " + "; ".join(f"{f.name} ({f.needs})" for f in formats),
        )
    for form in formats:
        reason = form.detect(row)
        if reason:
            return form, reason
    needs = "; ".join(f"{form.name} ({form.needs})" for form in formats)
    raise SwiftFP8Error(
        f"no row format{'' if task == 'sft' else f' of task={task}'} fits the columns "
        f"{', '.join(map(str, row)) or '(none)'}",
        where=where,
        fix=f"{_other_task(row)}rename columns, as "
        f"'data.columns={{ask: instruction, reply: output}}'; formats: {needs}",
    )


def _other_task(row: Row) -> str:
    """Advice to set the task that reads such rows, if there is one."""
    from swiftfp8.data.task_formats import task_formats
    from swiftfp8.tasks import TASKS

    for task in TASKS.values():
        for form in task_formats(task.formats):
            if reason := form.detect(row):
                return f"set task={task.name}, which reads rows with {reason}; or "
    return ""


def rename(row: Row, columns: Mapping[str, str]) -> Row:
    """`columns` maps old names to new ones; a renamed column replaces one of the new name."""
    if not columns:
        return row
    kept = {key: value for key, value in row.items() if key not in columns}
    return kept | {new: row[old] for old, new in columns.items() if old in row}


def decoded(value: Any) -> Any:
    """A cell of a table may hold a list or an object as JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def read_turn(turn: Any, k: int) -> Message:
    """One turn, written as role and content or as from and value. Raises BadRow."""
    if isinstance(turn, Mapping) and "from" in turn and "value" in turn:
        return _said(turn, k)
    if isinstance(turn, Mapping):
        return _message(turn, k)
    raise BadRow(f"turn {k} is not an object with role and content")


def read_question(row: Row) -> list[Message] | None:
    """History and question of an Alpaca-like row without its answer; None where it has none."""
    question = next((name for name in _QUESTIONS if isinstance(row.get(name), str)), None)
    if question is None:
        return None
    asked = _convert_alpaca({**row, "instruction": row[question], "output": "."})
    assert not isinstance(asked, str)
    return asked[:-1]


def require_text(value: Any, name: str) -> str:
    """`value` where it is text that isn't blank. Raises BadRow."""
    text = _string(value, name)
    if not text.strip():
        raise BadRow(f"{name} is empty")
    return text


def check_turns(messages: list[Message]) -> list[Message]:
    """The conversation where its roles come in turn and an answer is last. Raises BadRow."""
    return _checked(messages)


def read_tools(row: Row) -> list[Any] | None:
    """The functions that a row's column `tools` offers, a list or its JSON; None where it is empty.

    Raises BadRow where it is no list of objects.
    """
    value = row.get("tools")
    if isinstance(value, str) and value.strip():
        value = _parsed(value, "tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow(f"'tools' is not a list of functions: {shorten(repr(value), 40)}")
    return [_without_none(tool) for tool in value]


def _detect_messages(row: Row) -> str | None:
    for column in ("messages", "conversations", "conversation"):
        turns = decoded(row.get(column))
        if _list_of(turns, "role", "content"):
            return f"column '{column}' lists turns with 'role' and 'content'"
    return None


def _convert_messages(row: Row) -> Content:
    column = next((c for c in ("messages", "conversations", "conversation") if c in row), None)
    if column is None:
        raise BadRow("no 'messages'")
    turns = _turns(row, column)
    messages = [_message(turn, k) for k, turn in enumerate(turns, start=1)]
    return _checked(_with_system(row, messages))


def _message(turn: Mapping[str, Any], k: int) -> Message:
    """A turn with what templates know of it; columns of tables leave fields empty, not out."""
    role = _role(turn.get("role"), _ROLES)
    calls = _calls(turn.get("tool_calls"), k)
    message: Message = {"role": role, "content": _content(turn.get("content"), k, empty=calls)}
    reasoning = turn.get("reasoning_content")
    if reasoning and role == "assistant":
        message["reasoning_content"] = _string(reasoning, f"reasoning_content of turn {k}")
    if calls:
        message["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if role == "tool" and turn.get(name) is not None:
            message[name] = _string(turn[name], f"{name} of turn {k}")
    return message


def _calls(value: Any, turn: int) -> list[Any]:
    """Tool calls as templates expect them: arguments as an object, not as its JSON."""
    calls = decoded(value) or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow(f"tool_calls of turn {turn} are not a list of calls")
    made = []
    for call in map(_without_none, calls):
        called = call.get("function", call)
        if not isinstance(called, Mapping) or not isinstance(called.get("name"), str):
            raise BadRow(f"a tool call of turn {turn} names no function")
        arguments = called.get("arguments")
        if isinstance(arguments, str):
            arguments = _parsed(arguments, f"the arguments of a tool call of turn {turn}")
        called = {**called, "arguments": arguments or {}}
        made.append({"type": "function", **call, "function": called} if "function" in call
                    else {"type": "function", "function": called})  # fmt: skip
    return made


def _detect_sharegpt(row: Row) -> str | None:
    for column in ("conversations", "conversation"):
        if _list_of(decoded(row.get(column)), "from", "value"):
            return f"column '{column}' lists turns with 'from' and 'value'"
    return None


def _convert_sharegpt(row: Row) -> Content:
    column = "conversations" if "conversations" in row else "conversation"
    turns = _turns(row, column)
    messages = [_said(turn, k) for k, turn in enumerate(turns, start=1)]
    return _checked(_with_system(row, messages))


def _said(turn: Mapping[str, Any], k: int) -> Message:
    content = _content(turn.get("value"), k)
    if turn.get("from") != "function_call":
        return {"role": _role(turn.get("from"), _SHAREGPT), "content": content}
    calls = _parsed(content, f"the function call of turn {k}")
    calls = _calls(calls if isinstance(calls, list) else [calls], k)
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _detect_alpaca(row: Row) -> str | None:
    for question, answer in _PAIRS:
        if question in row and answer in row:
            return f"columns '{question}' and '{answer}'"
    return None


def _convert_alpaca(row: Row) -> Content:
    question, answer = max(_PAIRS, key=lambda pair: (pair[0] in row) + (pair[1] in row))
    asked = _string(row.get(question), question)
    extra = _string(row.get("input") or "", "input")
    messages: list[Message] = []
    history = decoded(row.get("history")) or ()
    if not isinstance(history, list | tuple):
        raise BadRow("'history' is not a list of pairs")
    for k, pair in enumerate(history, start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow(f"history item {k} is not a pair of question and answer")
        messages.append({"role": "user", "content": _string(pair[0], f"history {k}")})
        messages.append({"role": "assistant", "content": _string(pair[1], f"history {k}")})
    messages.append({"role": "user", "content": f"{asked}\n{extra}" if extra.strip() else asked})
    messages.append({"role": "assistant", "content": _string(row.get(answer), answer)})
    return _checked(_with_system(row, messages))


def _detect_text(row: Row) -> str | None:
    return "column 'text'" if "text" in row else None


def _convert_text(row: Row) -> Content:
    text = _string(row.get("text"), "text")
    if not text.strip():
        raise BadRow("the text is empty")
    return text


_HALF = re.compile("[\ud800-\udfff]")  # JSON can write one; no tokenizer takes it
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
_PAIRS = (
    ("instruction", "output"),
    ("query", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
)

_QUESTIONS = ("instruction", "prompt", "query", "question")

FORMATS = (
    Format(
        name="messages",
        needs="messages: role and content",
        detect=_detect_messages,
        convert=_convert_messages,
    ),
    Format(
        name="sharegpt",
        needs="conversations: from and value",
        detect=_detect_sharegpt,
        convert=_convert_sharegpt,
    ),
    Format(
        name="alpaca",
        needs="instruction, output; optional input, history, system",
        detect=_detect_alpaca,
        convert=_convert_alpaca,
    ),
    Format(name="text", needs="text", detect=_detect_text, convert=_convert_text),
)


def _list_of(turns: Any, *keys: str) -> bool:
    return (
        isinstance(turns, list)
        and bool(turns)
        and isinstance(turns[0], Mapping)
        and all(key in turns[0] for key in keys)
    )


def _turns(row: Row, column: str) -> list[Mapping[str, Any]]:
    turns = decoded(row.get(column))
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise BadRow(f"'{column}' is not a list of turns")
    if not turns:
        raise BadRow(f"'{column}' is empty")
    return turns


def _role(role: Any, known: Mapping[str, str]) -> str:
    if not isinstance(role, str) or role not in known:
        raise BadRow(f"unknown role {role!r}; known: {', '.join(known)}")
    return known[role]


def _content(content: Any, turn: int, *, empty: Any = False) -> str:
    """Text, or a list of parts that are all text; nothing where it may be `empty`."""
    if content is None and empty:
        return ""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, Mapping) else p for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise BadRow(f"turn {turn} has parts that are not text")
        return _string("".join(parts), f"content of turn {turn}")
    return _string(content, f"content of turn {turn}")


def _string(value: Any, name: str) -> str:
    if value is None:
        raise BadRow(f"no {name}")
    if not isinstance(value, str):
        raise BadRow(f"{name} is not text: {shorten(repr(value), 40)}")
    if _HALF.search(value):
        raise BadRow(f"{name} holds half a character (a lone surrogate), which is not Unicode text")
    return value


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow(f"{name}: not JSON, near `{shorten(text, 40)}`") from error


def _without_none(value: Any) -> Any:
    """Tables give every row the fields of all rows."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    system = row.get("system")
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": _string(system, "system")}, *messages]
    return messages


def _checked(messages: list[Message]) -> list[Message]:
    """System first if at all, a user's turn next, roles in turn, an answer last and none empty."""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    before = None
    for message in turns:
        role = message["role"]
        if role == "system":
            raise BadRow("a system turn that is not the first")
        if before is None and role != "user":
            raise BadRow(f"the first turn is the {role}'s, not the user's")
        if role == before and role != "tool":
            raise BadRow(f"two {role} turns in a row")
        if role == "assistant" and not (message["content"].strip() or "tool_calls" in message):
            raise BadRow("no answer: an assistant turn is empty")
        before = role
    if before != "assistant":
        raise BadRow("no answer: the last turn is not the assistant's")
    return messages

"""Command-line tokens `key=value` to typed values.

Numbers, flags, lists and sweeps are read by Hydra's override grammar. Text is not: that grammar
rejects everyday values such as `rows.jsonl#500` or `a=b`, so the schema says which keys hold text
and their values are taken as typed. A comma outside quotes and brackets makes a sweep.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swiftfp8.config.fields import field_docs, mapping_parent, schema_groups, unknown_key
from swiftfp8.errors import SwiftFP8Error

_CLOSING = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True, kw_only=True)
class Override:
    """One key set to one value; `origin` is where, for messages: a token or a Python argument."""

    key: str
    value: Any
    text: str
    origin: str


def parse_tokens(
    tokens: Sequence[str],
) -> tuple[list[tuple[Override, ...]], list[SwiftFP8Error]]:
    """Each token's alternatives (more than one is a sweep), and what could not be read."""
    parsed: list[tuple[Override, ...]] = []
    problems: list[SwiftFP8Error] = []
    for token in join_spaced(tokens):
        try:
            parsed.append(_parse_token(token))
        except SwiftFP8Error as problem:
            problems.append(problem)
    return parsed, problems


def expand_sweep(parsed: Sequence[tuple[Override, ...]]) -> list[tuple[Override, ...]]:
    """Every combination of the alternatives; the last token varies fastest."""
    return list(itertools.product(*parsed))


def join_spaced(tokens: Sequence[str]) -> list[str]:
    """Tokens with those that were typed with spaces around the `=` put together again."""
    joined: list[str] = []
    for token in tokens:
        opened = joined and ("=" not in joined[-1] or joined[-1].endswith("="))
        if opened and (token.startswith("=") or (joined[-1].endswith(" =") and "=" not in token)):
            joined[-1] += f" {token}"
        else:
            joined.append(token)
    return joined


def split_token(token: str) -> tuple[str, str]:
    """`key=value` cut at the first `=`; raises where there is none, or a space before it."""
    key, equals, text = token.partition("=")
    if equals and key.strip() and key != key.rstrip():
        fix = f"write {key.strip()}={text.strip()}"
        raise SwiftFP8Error(f"'{token}' has spaces around its =", where="command line", fix=fix)
    key = key.strip()
    if not equals or not key:
        bare = token.strip()
        fix = f"write key=value; for a recipe: config={bare or 'quickstart'}"
        raise SwiftFP8Error(f"'{token}' is no key=value", where="command line", fix=fix)
    return key, text


def take(tokens: Sequence[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The values of `names` among the tokens, as typed or unquoted, and the other tokens."""
    taken: dict[str, str] = {}
    rest: list[str] = []
    for token in tokens:
        key, equals, text = token.partition("=")
        if equals and key in names:
            quoted = unquote(text)
            taken[key] = text if quoted is None else quoted
        else:
            rest.append(token)
    return taken, rest


def to_token(key: str, value: Any) -> str:
    """The command-line token that sets `key` to `value`."""
    return f"{key}={_written(value)}"


def unquote(text: str) -> str | None:
    """The text between a pair of quotes that spans all of `text`, or None."""
    body = text.strip()
    if len(body) < 2 or body[0] not in "'\"" or body[-1] != body[0]:
        return None
    inner = body[1:-1]
    if body[0] in inner.replace("\\" + body[0], ""):
        return None
    return inner.replace("\\" + body[0], body[0])


def _parse_token(token: str) -> tuple[Override, ...]:
    origin = f"command line, {token}"
    if token.startswith("~"):
        raise _no_deletion(token)
    key, text = split_token(token)
    bare = key.lstrip("+")
    if key != bare:
        _check_addition(bare, text, token)
    values = _read(bare, text, token)
    return tuple(
        Override(
            key=bare,
            value=value,
            text=f"{bare}={part.strip()}",
            origin=origin if len(values) == 1 else f"command line, {bare}={part.strip()}",
        )
        for value, part in values
    )


def _no_deletion(token: str) -> SwiftFP8Error:
    name = token[1:].partition("=")[0]
    doc = field_docs().get(name)
    fix = f"write {name}=null" if doc and doc.nullable else "give the key another value"
    return SwiftFP8Error(f"'{token}': a key can't be deleted", where="command line", fix=fix)


def _check_addition(key: str, text: str, token: str) -> None:
    """`+key=value` is for entries of mappings; every other key exists already, or never will."""
    doc = field_docs().get(key)
    if mapping_parent(key) or (doc and doc.kind == "mapping"):
        return
    if doc is None and key not in schema_groups():
        raise unknown_key(key, where=f"command line, {token}")
    what = f"'{token}': {key} exists and can't be added"
    raise SwiftFP8Error(what, where="command line", fix=f"write {key}={text}")


def _read(key: str, text: str, token: str) -> list[tuple[Any, str]]:
    """The values that `text` stands for, each with its own text."""
    doc = field_docs().get(key)
    kind = doc.kind if doc else "text" if mapping_parent(key) else None
    if text.strip().startswith("choice(") and text.strip().endswith(")"):
        text = text.strip()[len("choice(") : -1]
    elif kind == "free_text":
        return [(_scalar_text(text), text)]
    if kind not in ("text", "free_text", "names"):
        return _read_by_hydra(text, token)
    parts = _split_commas(text, token) if text.strip() else [text]
    return [(_text_value(part, token, as_list=kind == "names"), part) for part in parts]


def _text_value(part: str, token: str, *, as_list: bool) -> Any:
    body = part.strip()
    if body.startswith("[") and body.endswith("]"):
        inner = body[1:-1].strip()
        return [_scalar_text(item) for item in _split_commas(inner, token)] if inner else []
    value = _scalar_text(part)
    return [value] if as_list and value else value


def _scalar_text(text: str) -> str | None:
    if text.strip() == "null":
        return None
    quoted = unquote(text)
    return text.strip() if quoted is None else quoted


def _read_by_hydra(text: str, token: str) -> list[tuple[Any, str]]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep, Transformer
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"value={text}")
        if not override.is_sweep_override():
            return [(override.value(), text)]
        sweep = override.value()
        if not isinstance(sweep, ChoiceSweep | RangeSweep):
            fix = "list the values: key=1,2,3"
            raise SwiftFP8Error(f"'{token}': this sweep has no end", where="command line", fix=fix)
        values = list(override.sweep_iterator(transformer=Transformer.identity))
        return [(Override._convert_value(value), _shown(value)) for value in values]
    except HydraException:
        parts = _split_commas(text, token)  # complains about open brackets and quotes
        return [(_scalar_text(part), part) for part in parts]


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(_written(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(value)
    plain = not set(text) & set(",'\"[]{}()") and text == text.strip() and text != "null"
    escaped = text.replace("'", "\\'")
    return text if plain else f"'{escaped}'"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    with_quotes = getattr(value, "with_quotes", None)
    return str(with_quotes() if with_quotes else value)


def _split_commas(text: str, token: str) -> list[str]:
    """Cut at commas outside quotes and brackets. An apostrophe inside a word is no quote."""
    parts, start = [""], True
    closing: list[str] = []
    quote = ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and start:
            quote = char
        elif char in _CLOSING and (closing or start):
            closing.append(_CLOSING[char])
        elif closing and char == closing[-1]:
            closing.pop()
        elif char == "," and not closing:
            parts.append("")
            start = True
            continue
        start = (start and char == " ") or (bool(closing) and char in "[{(,: ")
        parts[-1] += char
    if quote or closing:
        missing = quote or closing[-1]
        fix = f"close it with {missing}, or put the whole value in quotes: key='\"...\"'"
        raise SwiftFP8Error(f"'{token}': {missing} is missing", where="command line", fix=fix)
    return parts

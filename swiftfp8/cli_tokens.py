"""The `key=value` argument that commands share: its type, its completion, its checks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from swiftfp8.errors import SwiftFP8Error, raise_all

if TYPE_CHECKING:
    from swiftfp8.config.compose import Composed

T = TypeVar("T")


def complete(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Shell completion of the word being typed."""
    from swiftfp8.config.complete import complete_token

    before = ctx.params.get("tokens") or ()
    yield from complete_token(ctx.info_name or "", list(before), incomplete)


Tokens = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Options; `swiftfp8 config list` and `swiftfp8 config explain KEY` say which.",
        autocompletion=complete,
        show_default=False,
    ),
]


def check_keys(tokens: Sequence[str], *, also: Sequence[str]) -> None:
    """Fail for tokens whose key neither the schema nor the command (`also`) knows."""
    from swiftfp8.config.fields import field_docs, mapping_parent, schema_groups, unknown_key
    from swiftfp8.config.tokens import parse_tokens

    parsed, problems = parse_tokens(tokens)
    for first, *_ in parsed:
        known = first.key in field_docs() or first.key in schema_groups()
        if not known and not mapping_parent(first.key):
            problems.append(unknown_key(first.key, where=first.origin, also=tuple(also)))
    raise_all(problems)


def read_values(request: type[T], tokens: Sequence[str]) -> T:
    """Fill a request's fields from tokens; text is taken as typed."""
    from swiftfp8.config.tokens import split_token, unquote
    from swiftfp8.registry import unknown

    kinds = get_type_hints(request)
    values: dict[str, Any] = {}
    problems: list[SwiftFP8Error] = []
    for token in tokens:
        try:
            key, text = split_token(token)
            if key not in kinds:
                raise unknown("key", key, kinds, where=f"command line, {token}")
            quoted = unquote(text)
            values[key] = _typed(kinds[key], text if quoted is None else quoted, token)
        except SwiftFP8Error as problem:
            problems.append(problem)
    raise_all(problems)
    assert dataclasses.is_dataclass(request)
    return request(**values)


def read_count(name: str, text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise SwiftFP8Error(
            f"{name} must be a whole number of at least 1, not '{text}'",
            where=f"command line, {name}={text}",
        )
    return int(text)


def print_notes(members: Sequence[Composed]) -> None:
    """Print the remarks that composing left, once each."""
    for note in dict.fromkeys(note for member in members for note in member.notes):
        print(f"note: {note}", file=sys.stderr)


def _typed(kind: Any, text: str, token: str) -> Any:
    where = f"command line, {token}"
    if kind == bool | None:
        if text.lower() == "null":
            return None
        kind = bool
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise SwiftFP8Error(f"must be true or false, not '{text}'", where=where)
        return text.lower() == "true"
    if kind == int | None:
        kind = int
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError as error:
        name = "a whole number" if kind is int else "a number"
        raise SwiftFP8Error(f"must be {name}, not '{text}'", where=where) from error

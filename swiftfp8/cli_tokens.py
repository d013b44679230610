"""The `key=value` argument that commands share: its type, its completion, its checks."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer.core import TyperCommand

from swiftfp8.errors import SwiftFP8Error, raise_all
from swiftfp8.failures import report

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


class KeyValueCommand(TyperCommand):
    """A command whose options, written as other trainers do (`--lora_rank 16`), are explained."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, once no argument is one of our keys with dashes before it."""
        declared = {name for param in self.params for name in param.opts}
        if any(a.startswith("--") and a.partition("=")[0] not in declared for a in args):
            written = _as_tokens(self.name or "", args)
            if written != args:
                line = f"{ctx.command_path} {shlex.join(written)}"
                raise typer.Exit(report(_dashes(line)))
        return super().parse_args(ctx, args)


def _dashes(line: str) -> SwiftFP8Error:
    what = "options are key=value, without dashes"
    return SwiftFP8Error(what, where="command line", fix=f"write {line}")


def _as_tokens(command: str, args: Sequence[str]) -> list[str]:
    """The arguments, with `--key value`, `--key=value` and `--flag` as tokens."""
    from swiftfp8.config.complete import command_keys
    from swiftfp8.config.fields import SYNONYMS

    known, written, rest = dict(command_keys(command)), [], list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        key = name if name in known else SYNONYMS.get(name, "")
        if not word.startswith("--") or key not in known:
            written.append(word)
        elif equals:
            written.append(f"{key}={value}")
        elif rest and not rest[0].startswith("--") and "=" not in rest[0]:
            written.append(f"{key}={rest.pop(0)}")
        else:
            written.append(f"{key}=true")
    return written


def check_keys(tokens: Sequence[str], *, also: Sequence[str], group: str) -> None:
    """Fail for tokens whose key neither the schema nor the command (`also`) knows.

    `group` is the one whose keys the command is about.
    """
    from swiftfp8.config.fields import field_docs, mapping_parent, schema_groups, unknown_key
    from swiftfp8.config.tokens import parse_tokens

    parsed, problems = parse_tokens(tokens)
    for first, *_ in parsed:
        known = first.key in field_docs() or first.key in schema_groups()
        if not known and not mapping_parent(first.key):
            problems.append(
                unknown_key(first.key, where=first.origin, also=tuple(also), group=group)
            )
    raise_all(problems)


def read_values(request: type[T], tokens: Sequence[str]) -> T:
    """Fill a request's fields from tokens; text is taken as typed."""
    from swiftfp8.config.tokens import join_spaced, split_token, unquote
    from swiftfp8.registry import unknown

    kinds = get_type_hints(request)
    values: dict[str, Any] = {}
    problems: list[SwiftFP8Error] = []
    for token in join_spaced(tokens):
        try:
            key, text = split_token(token)
            if key not in kinds:
                raise unknown("key", key, kinds, where=f"command line, {token}")
            quoted = unquote(text)
            values[key] = _typed(request, key, text if quoted is None else quoted, token)
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
            fix=f"give a whole number, such as {name}=10",
        )
    return int(text)


def print_notes(members: Sequence[Composed]) -> None:
    """Print the remarks that composing left, once each."""
    for note in dict.fromkeys(note for member in members for note in member.notes):
        print(f"note: {note}", file=sys.stderr)


def _typed(request: Any, key: str, text: str, token: str) -> Any:
    kind, where = get_type_hints(request)[key], f"command line, {token}"
    if kind == bool | None:
        if text.lower() == "null":
            return None
        kind = bool
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise SwiftFP8Error(f"{key} must be true or false, not '{text}'", where=where)
        return text.lower() == "true"
    if kind == int | None:
        kind = int
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise SwiftFP8Error(
            f"{key} must be {' or '.join(get_args(kind))}, not '{text}'", where=where
        )
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError as error:
        name = "a whole number" if kind is int else "a number"
        usual = getattr(request, key, None)
        fix = f"give {name}" + (f", such as {key}={usual}" if usual is not None else "")
        raise SwiftFP8Error(f"{key} must be {name}, not '{text}'", where=where, fix=fix) from error

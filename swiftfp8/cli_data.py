"""`swiftfp8 data ...`: look at data without training on it."""

from __future__ import annotations

import typer

from swiftfp8.cli_tokens import KeyValueCommand, Tokens, print_notes
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.failures import guarded

data_app = typer.Typer(
    help="Look at data before training on it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_NUMBERS = {"sample": 5_000, "show": 3}


@data_app.callback()
def group() -> None:
    """Make `inspect` a command of a group, though it is the only one."""


@data_app.command(cls=KeyValueCommand)
@guarded
def inspect(tokens: Tokens = None) -> None:
    """Show what a data set holds: dataset=... model=... or config=<recipe or path>

    Prints formats, bad rows, duplicates, a histogram of lengths, the share that max_length cuts,
    and rows with what is trained marked. sample=5000 rows are tokenized (0: all); show=3 rows are
    printed.
    """
    from rich.console import Console

    from swiftfp8.config.compose import compose_config, require_inputs, sources_named
    from swiftfp8.config.tokens import take

    taken, rest = take(tokens or [], ("config", *_NUMBERS))
    numbers = {name: _number(name, taken.get(name, default)) for name, default in _NUMBERS.items()}
    composed = compose_config(taken.get("config"), rest)
    print_notes([composed])
    require_inputs(composed)
    from swiftfp8.data.inspect import inspect_datasets
    from swiftfp8.models.source import resolve_source
    from swiftfp8.models.tokenizer import load_tokenizer
    from swiftfp8.report.data_view import print_inspection

    config = composed.config
    with sources_named(composed):
        source = resolve_source(config)
        tokenizer = load_tokenizer(source, config.template, config.trust_remote_code)
        found = inspect_datasets(config, tokenizer, **numbers)
    print_inspection(found, Console())


def _number(name: str, value: int | str) -> int:
    text = str(value)
    if not text.isdigit():
        raise SwiftFP8Error(
            f"{name} must be a whole number, not '{text}'",
            where=f"command line, {name}={text}",
            fix=f"give a whole number, such as {name}={_NUMBERS[name]}",
        )
    return int(text)

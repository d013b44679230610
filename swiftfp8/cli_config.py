"""`swiftfp8 config ...`: look at configurations without running anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftfp8.cli_tokens import KeyValueCommand, Tokens, print_notes
from swiftfp8.failures import guarded

if TYPE_CHECKING:
    from swiftfp8.config.compose import Composed

config_app = typer.Typer(
    help="Show, explain, compare, list and copy configurations.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@config_app.command(cls=KeyValueCommand)
@guarded
def show(tokens: Tokens = None) -> None:
    """Print the resolved YAML: config=<recipe or path> [key=value ...]"""
    from swiftfp8.config.compose import to_yaml

    print(to_yaml(_compose(tokens, check=True).config), end="")


@config_app.command()
@guarded
def explain(
    key: Annotated[str, typer.Argument(help="A key such as lora_rank, or a group.")],
    tokens: Tokens = None,
) -> None:
    """Say what a key does, what it can be, and where its value comes from."""
    from swiftfp8.config.explain import explain_key

    shown = explain_key(_compose(tokens, check=False), key)
    print("\n\n".join(_explanation(item) for item in shown))


@config_app.command()
@guarded
def diff(
    first: Annotated[str, typer.Argument(help="A recipe, a path or a run directory.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
) -> None:
    """Print the keys in which two recipes, files or runs differ."""
    from swiftfp8.config.explain import diff_configs

    rows = diff_configs(first, second)
    if not rows:
        print("no difference")
    for key, left, right in rows:
        print(f"{key}\n  {first}: {_shown(left)}\n  {second}: {_shown(right)}")


@config_app.command("list")
@guarded
def list_all() -> None:
    """List recipes, group options, model families and data sets."""
    from swiftfp8.config.explain import list_configs

    for title, entries in list_configs().items():
        print(title)
        width = max((len(name) for name, _ in entries), default=0)
        for name, comment in entries:
            print(f"  {name:<{width}}  {comment}".rstrip())
        print()


@config_app.command()
@guarded
def copy(
    name: Annotated[str, typer.Argument(help="A packaged recipe.")],
    destination: Annotated[str | None, typer.Argument(help="A new file, or a folder.")] = None,
) -> None:
    """Copy a packaged recipe to this folder, to change it."""
    from swiftfp8.config.explain import copy_recipe

    target = copy_recipe(name, destination)
    print(f"{target}\nrun it: swiftfp8 train config={target.name}")


def _compose(tokens: list[str] | None, *, check: bool) -> Composed:
    from swiftfp8.config.compose import compose_config
    from swiftfp8.config.tokens import take

    taken, rest = take(tokens or [], ("config",))
    composed = compose_config(taken.get("config"), rest, check=check)
    print_notes([composed])
    return composed


def _explanation(item: Any) -> str:
    lines = [f"{item.key} = {_shown(item.value)}", f"  {item.help}"]
    lines.append(f"  set by:  {item.origin}")
    lines.append(f"  type:    {item.type_text}")
    if item.options:
        lines.append(f"  options: {', '.join(item.options)}")
    lines.append(f"  default: {_shown(item.default)}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """A value as YAML writes it, on one line."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")

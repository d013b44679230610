"""Answers to "what does this key do, and where did its value come from?"."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftfp8.config.compose import (
    Composed,
    compose_config,
    find_recipe,
    flatten,
    read_resolved,
)
from swiftfp8.config.fields import field_docs, unknown_key
from swiftfp8.config.paths import GROUPS, configs_dir, group_options, recipes_dir, yaml_names
from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.registry import unknown


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One key: its value, where that was set, and what the schema says of the key."""

    key: str
    value: Any
    origin: str
    type_text: str
    default: Any
    help: str
    options: tuple[str, ...] = ()


def explain_key(composed: Composed, key: str) -> list[Explanation]:
    """Explain one key, or every key of a group such as `precision`."""
    docs = field_docs()
    keys = [name for name in docs if name == key or name.startswith(f"{key}.")]
    if not keys:
        raise unknown_key(key, where="command line")
    values = flatten(composed.config)
    return [
        Explanation(
            key=name,
            value=values[name],
            origin=_origin(composed, name),
            type_text=docs[name].type_text,
            default=docs[name].default,
            help=docs[name].help,
            options=tuple(group_options(name)) if name in GROUPS else (),
        )
        for name in keys
    ]


def diff_configs(first: str, second: str) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ between two recipes, files or run directories."""
    left, right = (flatten(_any_config(name)) for name in (first, second))
    return [(key, left[key], right[key]) for key in left if left[key] != right[key]]


def list_configs() -> dict[str, list[tuple[str, str]]]:
    """What `config=`, the groups, `model_type` and `dataset` can be: (name, about)."""
    folders = {
        "recipes (config=)": recipes_dir(),
        **{f"{group} options ({group}=)": configs_dir() / group for group in GROUPS},
        "model families (model_type=)": configs_dir() / "model",
        "data sets (dataset=)": configs_dir() / "dataset",
    }
    return {
        title: [(name, about(folder / f"{name}.yaml")) for name in yaml_names(folder)]
        for title, folder in folders.items()
    }


def copy_recipe(name: str, destination: str | None) -> Path:
    """Copy a packaged recipe to the user's folder; never over an existing file."""
    source = recipes_dir() / f"{name}.yaml"
    if not source.is_file():
        raise unknown("recipe", name, yaml_names(recipes_dir()), where="command line")
    target = Path(destination).expanduser() if destination else Path.cwd()
    if target.is_dir():
        target = target / source.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as original, target.open("xb") as copy:
            shutil.copyfileobj(original, copy)
    except FileExistsError as error:
        fix = f"give another name: swiftfp8 config copy {name} my_{name}.yaml"
        raise SwiftFP8Error("the file exists already", where=str(target), fix=fix) from error
    except OSError as error:
        raise SwiftFP8Error(f"can't be written: {error.strerror}", where=str(target)) from error
    return target


def about(path: Path) -> str:
    """What a YAML file says of itself: its description, or its first comment but the command.

    Of more than a sentence, the first.
    """
    text = path.read_text(encoding="utf-8")
    described = re.search(r"^description: *(.+(?:\n +.+)*)$", text, re.MULTILINE)
    if described:
        return " ".join(described[1].split())
    lines = [line[1:].strip() if line.startswith("#") else "" for line in text.splitlines()]
    told = "\n".join(line for line in lines if not line.startswith(("@", "swiftfp8 ")))
    paragraph = " ".join(told.strip().partition("\n\n")[0].split())
    return re.sub(r"(?<!\bal)\. (?=[A-Z0-9]).*", ".", paragraph)


def _any_config(name: str) -> Config:
    path = find_recipe(name)
    if path.name == "resolved.yaml":
        return read_resolved(path)
    return compose_config(name, check=False).config


def _origin(composed: Composed, key: str) -> str:
    """Where a key was set; for a mapping, where its entries were."""
    inside = [origin for name, origin in composed.provenance.items() if name.startswith(f"{key}.")]
    return ", ".join(dict.fromkeys(inside)) if inside else composed.provenance[key]

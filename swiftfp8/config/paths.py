"""Where packaged files lie: inside the installed package, or in the checkout it runs from.

The wheel carries `configs/` and `recipes/` inside the package (`_configs`, `_recipes`); an
editable install or a plain checkout has them beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from swiftfp8.errors import SwiftFP8Error

_PACKAGE = Path(__file__).resolve().parent.parent

GROUPS = ("precision", "tuner", "train", "export", "rlhf")
"""The packaged option groups. `model/` and `dataset/` hold registered things, not options."""


def configs_dir() -> Path:
    """The packaged option groups, model families and datasets."""
    return _packaged("_configs", "configs")


def recipes_dir() -> Path:
    """The packaged recipes."""
    return _packaged("_recipes", "recipes")


def assets_dir() -> Path:
    """Files that code reads as they are: the embedded model, tokenizer and rows."""
    return _PACKAGE / "assets"


def cache_dir() -> Path:
    """The folder of everything that swiftfp8 keeps between runs."""
    named = os.environ.get("SWIFTFP8_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "swiftfp8"


def find_chat_template(template: str, *, where: str | None = "template") -> Path:
    """A Jinja file, or a packaged template by its name, for tokenizers that carry none.

    Raises:
        SwiftFP8Error: it is neither.
    """
    path = Path(template).expanduser()
    if path.is_file():
        return path
    folder = _PACKAGE / "models" / "templates"
    packaged = {file.stem: file for file in sorted(folder.glob("*.jinja"))}
    if template in packaged:
        return packaged[template]
    fix = f"give a Jinja file, or one of: {', '.join(packaged)}"
    raise SwiftFP8Error(f"no chat template file {template}", where=where, fix=fix)


def yaml_names(folder: Path) -> list[str]:
    """Names of the YAML files of `folder`, sorted, without their suffix."""
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder.is_dir() else []


def group_options(group: str, recipe: Path | None = None) -> list[str]:
    """Names that an option group offers, with those of the recipe's own folder."""
    own = yaml_names(recipe.parent / group) if recipe else []
    return sorted({*own, *yaml_names(configs_dir() / group)})


def model_types() -> list[str]:
    """Every name and alias of a model family."""
    folder = configs_dir() / "model"
    names = set(yaml_names(folder))
    for path in folder.glob("*.yaml"):
        names.update((yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("aliases", ()))
    return sorted(names)


def _packaged(inside: str, beside: str) -> Path:
    installed = _PACKAGE / inside
    return installed if installed.is_dir() else _PACKAGE.parent / beside

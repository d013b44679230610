"""Model families: what a checkpoint's architecture needs to be known by, one YAML file each.

`configs/model/<name>.yaml` adds a family; no code changes. An architecture that no file names, but
that transformers can load, gets a generic family. This module reads YAML only, so that names can be
listed and checked without importing torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from swiftfp8.config.paths import configs_dir
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.registry import unknown

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family. `name` is its file's name; the other fields are the file's keys.

    `model_types` are the `model_type` values of config.json that belong to it. Where families share
    one, `vocab_sizes` tells them apart, and `assumed` marks the one that is taken otherwise.
    `keep_high` maps patterns of module names to the reason why they stay out of FP8. `embedded` is
    the folder of a model that comes with the package. `chat_template` names the packaged template
    that fits base models, which have none of their own.
    """

    name: str
    aliases: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    vocab_sizes: tuple[int, ...] = ()
    assumed: bool = False
    default_model: str | None = None
    embedded: str | None = None
    keep_high: dict[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    notes: str = ""
    generic: bool = False

    def accepts(self, model_type: str | None) -> bool:
        """Whether a checkpoint of this `model_type` belongs to the family."""
        return model_type in self.model_types


def load_families(folder: Path | None = None) -> dict[str, Family]:
    """Every family of `configs/model/` (or of `folder`), by name."""
    return dict(_families(folder or configs_dir() / "model"))


def family_names() -> list[str]:
    """Every name and alias that `model_type` takes, for completion and suggestions."""
    families = load_families().values()
    return sorted({name for family in families for name in (family.name, *family.aliases)})


def family_named(name: str) -> Family:
    """The family called `name` or one of its aliases, whatever the case."""
    wanted = name.lower()
    families = load_families().values()
    for family in families:
        if wanted == family.name.lower():
            return family
    for family in families:
        if wanted in (alias.lower() for alias in family.aliases):
            return family
    raise unknown("model_type", name, family_names(), where="model_type")


def family_of(hf_config: Any) -> Family:
    """The family of a Hugging Face configuration (an object, or config.json as a mapping).

    An architecture without a family of its own gets a generic one, named after its `model_type`.
    """
    model_type = _get(hf_config, "model_type")
    text_config = _get(hf_config, "text_config")
    vocab_size = _get(hf_config, "vocab_size") or _get(text_config, "vocab_size")
    candidates = [
        family
        for family in load_families().values()
        if family.accepts(model_type) and not family.embedded
    ]
    for family in candidates:
        if vocab_size in family.vocab_sizes:
            return family
    for family in sorted(candidates, key=lambda family: not family.assumed):
        return family
    log.info("no family file for architecture '%s': loading it as a generic model", model_type)
    types = (str(model_type),) if model_type else ()
    return Family(name=str(model_type or "generic"), model_types=types, generic=True)


def describe_models() -> list[dict[str, str]]:
    """A row per family for `swiftfp8 models`: name, aliases, architectures, default, notes."""
    return [
        {
            "name": family.name,
            "aliases": ", ".join(family.aliases),
            "architectures": ", ".join(family.architectures),
            "default": family.default_model or "embedded in the package",
            "notes": family.notes,
        }
        for family in sorted(load_families().values(), key=lambda family: family.name)
    ]


@cache
def _families(folder: Path) -> tuple[tuple[str, Family], ...]:
    return tuple((path.stem, _read_family(path)) for path in sorted(folder.glob("*.yaml")))


def _read_family(path: Path) -> Family:
    """Read one family file; an unknown or misplaced key is an error that names the file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise SwiftFP8Error(f"not valid YAML: {error}", where=str(path)) from error
    if not isinstance(content, dict):
        raise SwiftFP8Error("a family file is a mapping of keys", where=str(path))
    known = {entry.name for entry in fields(Family)} - {"name", "generic"}
    for key in content:
        if key not in known:
            raise unknown("key of a model family", str(key), known, where=str(path))
    if not content.get("model_types"):
        raise SwiftFP8Error(
            "a family needs model_types, the model_type values of config.json that it covers",
            where=str(path),
        )
    values = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
    }
    return Family(name=path.stem, **values)


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

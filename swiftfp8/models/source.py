"""From what the user wrote to a local Hugging Face directory and its family.

A model is named by a local directory, a GGUF file, a hub id, or its family's name alone. Whatever
it was, the stages after this one see a directory with config.json, safetensors and a tokenizer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftfp8.config.model_names import missing_model
from swiftfp8.config.paths import assets_dir
from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.cache import safe_name
from swiftfp8.models.checkpoint import read_config_json
from swiftfp8.models.family import Family, family_named, family_names, family_of
from swiftfp8.models.gguf import convert_gguf
from swiftfp8.models.hub import download
from swiftfp8.models.multimodal import extract_text_model, is_multimodal

_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model is. `name` is short, for run directories; `origin` is what the user wrote.

    `path` is always a local Hugging Face directory of a text-only causal language model.
    """

    name: str
    path: Path
    family: Family
    origin: str


def resolve_source(config: Config) -> ModelSource:
    """Find the model that `config.model` and `config.model_type` name, and fetch it if need be.

    Raises SwiftFP8Error where neither is given, where the model can't be found or fetched, and
    where the checkpoint isn't of the family that `model_type` names.
    """
    asked = family_named(config.model_type) if config.model_type else None
    if config.model is None:
        return _default_of(asked, config.hub)
    if is_registered(config.model):
        return _default_of(_same(family_named(config.model), asked), config.hub)
    return _located(config.model, config.hub, asked)


def is_registered(model: str) -> bool:
    """Whether `model` is what model_type= takes, and no file or directory."""
    return model.lower() in map(str.lower, family_names()) and not _exists(model)


def _same(named: Family, asked: Family | None) -> Family:
    """The family that model= names, which model_type= must be too if it is given."""
    if asked is not None and asked != named:
        raise SwiftFP8Error(
            f"model_type={asked.name} doesn't fit: model= names family {named.name}",
            where="model",
            fix=f"set model_type={named.name} too, or leave one of them out",
        )
    return named


def _default_of(family: Family | None, hub: str) -> ModelSource:
    """The model that stands for a family where the user named no other."""
    if family is None:
        raise SwiftFP8Error(
            "no model given",
            where="model",
            fix="model=<directory, GGUF file or hub id>, or model_type=<family> for its default "
            "(model_type=tiny needs no download)",
        )
    if family.embedded:
        path = assets_dir() / family.embedded
        return ModelSource(name=family.name, path=path, family=family, origin=family.name)
    if not family.default_model:
        raise SwiftFP8Error(
            f"family {family.name} has no default model",
            where="model_type",
            fix="give model=<directory, GGUF file or hub id>",
        )
    return _located(family.default_model, hub, family)


def _located(model: str, hub: str, asked: Family | None) -> ModelSource:
    """Find `model` on disk or on the hub, convert it where it isn't a plain text model."""
    place = _on_disk(model)
    name = safe_name(_short_name(model))
    if place is None:
        place = download(model, hub)
    if place.is_dir() and not (place / "config.json").is_file():
        place = _only_gguf(place) or place
    if place.is_file():
        place = convert_gguf(place)
    config = read_config_json(place)
    family = _family(config, asked, place)
    if is_multimodal(config):
        place = extract_text_model(place, name)
    return ModelSource(name=name, path=place, family=family, origin=model)


def _on_disk(model: str) -> Path | None:
    """`model` as an existing directory or GGUF file; None where it can only be a hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise SwiftFP8Error(
                "model= names a file that is not GGUF",
                where=str(path),
                fix="give the directory that holds config.json and the safetensors files",
            )
        if _SPLIT_GGUF.search(path.stem):
            raise SwiftFP8Error(
                "the GGUF file is one part of several",
                where=str(path),
                fix="join the parts with llama.cpp's `llama-gguf-split --merge` first",
            )
        return path.resolve()
    if problem := missing_model(model):
        raise problem
    return None


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has no config.json, if it has one."""
    files = sorted(file for file in folder.glob("*") if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        raise SwiftFP8Error(
            f"the folder holds several GGUF files: {', '.join(file.name for file in files)}",
            where=str(folder),
            fix=f"name one, as in model={folder / files[0].name}",
        )
    return files[0] if files else None


def _short_name(model: str) -> str:
    """Last part of a path or hub id; a hub cache's snapshot goes by its repository's name."""
    parts = Path(model).expanduser().resolve().parts if _exists(model) else tuple(model.split("/"))
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].rpartition("--")[2]
    return re.sub(r"\.gguf$", "", parts[-1], flags=re.IGNORECASE)


def _exists(model: str) -> bool:
    return Path(model).expanduser().exists()


def _family(config: dict[str, Any], asked: Family | None, path: Path) -> Family:
    """The checkpoint's family, which must be the asked one if one was asked for."""
    found = family_of(config)
    if asked is None:
        return found
    if not asked.accepts(config["model_type"]):
        raise SwiftFP8Error(
            f"model_type={asked.name} doesn't fit: the checkpoint is {config['model_type']}"
            + ("" if found.generic else f" (family {found.name})"),
            where=str(path / "config.json"),
            fix="leave model_type out"
            + ("" if found.generic else f", or set model_type={found.name}"),
        )
    return asked

"""How a model is named: a hub id by its form, anything else by a path that must be there."""

from __future__ import annotations

import re
from pathlib import Path

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.registry import suggest_path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
GGUF_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)/(.+\.gguf)", re.IGNORECASE)
"""`owner/name/file.gguf`: one file of a repository."""


def looks_like_id(model: str) -> bool:
    """Whether `model` is written as a hub id: `name`, `owner/name` or `owner/name/file.gguf`."""
    return bool(_ID.fullmatch(model) or GGUF_ID.fullmatch(model))


def missing_model(model: str, where: str | None = "model") -> SwiftFP8Error | None:
    """The error for a path that is not there; None for what exists or may be on a hub."""
    path = Path(model).expanduser()
    written_as_path = model.startswith(("/", "./", "../", "~")) or model.endswith("/")
    if path.exists() or (looks_like_id(model) and not written_as_path):
        return None
    best = suggest_path(path)
    return SwiftFP8Error(
        f"no such model directory or file: {model}",
        where=where,
        fix=f"did you mean {best}?"
        if best
        else "paths start from the current folder; a hub id is written owner/name",
    )

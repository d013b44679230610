"""Names to things, with discovery by folder and a suggestion for a misspelt name.

A model family is a YAML file, a precision backend or an export format a Python file: dropping the
file into its folder registers it. Nothing else needs to change.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from swiftfp8.errors import SwiftFP8Error

_SHORT = 4  # letters


def discover(package: str) -> dict[str, ModuleType]:
    """Import every public module of `package` and return them by their `NAME` (or file name)."""
    parent = importlib.import_module(package)
    found: dict[str, ModuleType] = {}
    for info in pkgutil.iter_modules(parent.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package}.{info.name}")
        found[getattr(module, "NAME", info.name)] = module
    return found


def suggest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None where nothing is close.

    A short name with another first letter is another name (grpo, orpo), not a slip.
    """
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    if not close or (len(name) <= _SHORT and close[0][:1] != name[:1].lower()):
        return None
    return lowered[close[0]]


def suggest_path(path: Path) -> Path | None:
    """What lies beside `path` under nearly its name; a shared suffix alone is no likeness."""
    if not path.parent.is_dir():
        return None
    beside = [item.name for item in path.parent.iterdir()]
    same_suffix = {Path(name).stem: name for name in beside if Path(name).suffix == path.suffix}
    stem = suggest(path.stem, same_suffix)
    best = same_suffix[stem] if stem else None
    if best is None:
        others = {Path(name).stem: name for name in beside}
        best = others.get(path.stem)  # rows.json for rows.jsonl
    return path.parent / best if best else None


def unknown(
    kind: str, name: str, known: Iterable[str], *, where: str | None = None
) -> SwiftFP8Error:
    """The error for a name that is not registered: suggests the closest one, or lists them all."""
    names = sorted(known)
    best = suggest(name, names)
    fix = f"did you mean {best}?" if best else f"choose one of: {', '.join(names)}"
    return SwiftFP8Error(f"unknown {kind} '{name}'", where=where, fix=fix)

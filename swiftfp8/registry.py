"""Names to things, with discovery by folder and a suggestion for a misspelt name.

A model family is a YAML file, a precision backend or an export format a Python file: dropping the
file into its folder registers it. Nothing else needs to change.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from swiftfp8.errors import SwiftFP8Error


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
    """The known name closest to `name`, or None where nothing is close."""
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def unknown(
    kind: str, name: str, known: Iterable[str], *, where: str | None = None
) -> SwiftFP8Error:
    """The error for a name that is not registered: suggests the closest one, or lists them all."""
    names = sorted(known)
    best = suggest(name, names)
    fix = f"did you mean {best}?" if best else f"choose one of: {', '.join(names)}"
    return SwiftFP8Error(f"unknown {kind} '{name}'", where=where, fix=fix)

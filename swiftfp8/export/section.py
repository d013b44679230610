"""The types in a quantization section of JSON that anybody wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from swiftfp8.export.layout import Fault


def odd_types(section: Mapping[str, Any], kinds: Mapping[str, str], where: str) -> list[Fault]:
    """Values of another type than `kinds` says by key; null and keys that are not there may be.

    Kinds: "an object", "a list of lengths", "a list of names" (or of regexes behind "re:").
    """
    return [
        Fault(where=where, what=f"{key} is {section[key]!r}, not {kind}")
        for key, kind in kinds.items()
        if section.get(key) is not None and not _KINDS[kind](section[key])
    ]


def _is_name(entry: Any) -> bool:
    if not isinstance(entry, str):
        return False
    try:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error:
        return False
    return True


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "an object": lambda value: isinstance(value, dict),
    "a list of names": lambda value: isinstance(value, list) and all(map(_is_name, value)),
    "a list of lengths": lambda value: (
        isinstance(value, list) and all(type(length) is int and length > 0 for length in value)
    ),
}

"""generation_config.json that stops where the chat template ends a turn.

An engine stops at the tokens that this file names. The base model's own file knows nothing of the
turn's end that training on a chat template taught.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import read_json
from swiftfp8.export.files import has_tokenizer
from swiftfp8.models.turns import turn_ends

_GENERATION = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def add_turn_ends(directory: Path, *, trust_remote_code: bool = False) -> None:
    """Add the chat template's turn ends to `eos_token_id` where they are missing.

    Raises:
        SwiftFP8Error: a tokenizer, chat template or generation_config.json that can't be used.
    """
    if not has_tokenizer(directory):
        return
    from transformers import AutoTokenizer

    with _usable("the tokenizer can't be read", directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    settings = _generation_settings(directory)
    known = _as_list(settings.get("eos_token_id"))
    with _usable("the chat template fails", directory):
        ends = turn_ends(tokenizer)
    missing = [token for token in ends if token not in known]
    if missing:
        settings["eos_token_id"] = [*known, *missing]
        text = json.dumps(settings, indent=2) + "\n"
        (directory / _GENERATION).write_text(text, encoding="utf-8")


def _generation_settings(directory: Path) -> dict[str, Any]:
    """The file's, or what transformers takes from config.json where there is none."""
    if (directory / _GENERATION).is_file():
        return read_json(directory / _GENERATION)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    return {name: config[name] for name in _TOKENS if config.get(name) is not None}


@contextmanager
def _usable(failed: str, directory: Path) -> Iterator[None]:
    """Name what failed: files that nobody has checked raise anything."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise SwiftFP8Error(
            f"{failed}: {type(error).__name__}: {reason}",
            where=str(directory),
            fix="copy its files again from the model that it was made from",
        ) from error


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]

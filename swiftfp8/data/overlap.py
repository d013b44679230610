"""Evaluation rows that are training rows as well: a loss on them says nothing of new text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from swiftfp8.data.chat import Example


def digest(example: Example) -> bytes:
    """16 bytes that tell what a row says, wherever it stands."""
    said = repr((example.content, example.tools)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(said, digest_size=16).digest()


def count_known(held: Sequence[Example], train: Sequence[Example]) -> int:
    """How many rows of `held` say what a row of `train` says."""
    known = set(map(digest, train))
    return sum(digest(example) in known for example in held)

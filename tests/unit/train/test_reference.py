"""What the reference's stored log-probabilities are known by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from swiftfp8.train.reference import _mark


def test_the_same_rows_divided_otherwise_are_another_reference() -> None:
    rows = [{"chosen_ids": np.arange(n + 2)} for n in range(10)]
    plan: Any = SimpleNamespace(recipe=None, backend=None, compute_dtype="fp32")
    marks = [_mark({"train": rows[:n], "eval": rows[n:]}, plan) for n in (9, 8, 9)]
    assert marks[0] == marks[2] != marks[1]

"""What the labels of `task=seq_cls` are: how many, what they mean, and each row's as a target."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftfp8.data.files import shorten
from swiftfp8.data.formats import BadRow
from swiftfp8.data.reading import read_examples
from swiftfp8.data.report import bad_rows_error
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.tasks import Head

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"
_NAMED = 6  # labels that a reason names
_MOST = 1000


def find_head(config: Config) -> Head:
    """What the training rows' labels say of the head, unless the configuration says it.

    Raises:
        SwiftFP8Error: what reading raises; labels that contradict `num_labels` or `problem_type`;
            one label only.
    """
    rows = read_examples(config.dataset, config, "dataset")
    if rows.bad and (config.data.on_bad_row == "error" or not rows.examples):
        raise bad_rows_error(rows.bad, rows.total)
    labels = [example.content.label for example in rows.examples]
    problem, why = config.problem_type, "as problem_type says"
    if problem is None:
        problem, why = _problem_type(labels)
    if problem == REGRESSION:
        return _regression(config, why)
    names = _names(labels)
    wanted = config.num_labels or len(names)
    if len(names) > wanted:
        raise SwiftFP8Error(
            f"the training rows have {len(names)} labels, more than num_labels={wanted}: "
            f"{_listed(names)}",
            where="num_labels",
            fix="leave num_labels out, or correct the rows",
        )
    if problem == SINGLE and wanted < 2:
        raise SwiftFP8Error(
            f"all training rows have the same label, {_listed(names)}",
            where="dataset",
            fix="add rows of another label, or set num_labels",
        )
    numbers = [str(k) for k in range(wanted)]
    names = numbers if set(names) <= set(numbers) else _filled(names, wanted)
    what = "labels" if problem == SINGLE else "labels of which several may apply"
    return Head(
        num_labels=wanted,
        problem_type=problem,
        labels=tuple(names),
        reason=f"{wanted} {what} ({_listed(names)}): {why}",
    )


def to_target(label: Any, head: Head) -> np.ndarray:
    """The target of a row: int64 [] (one label), float32 [labels] (several) or [] (a number).

    Raises BadRow for a label that the head doesn't have.
    """
    if head.problem_type == REGRESSION:
        return np.asarray(_number(label), dtype=np.float32)
    if head.problem_type == SINGLE:
        if isinstance(label, tuple):
            if len(label) != 1:
                raise BadRow(f"{len(label)} labels where there must be one")
            (label,) = label
        return np.asarray(_index(label, head), dtype=np.int64)
    target = np.zeros(head.num_labels, dtype=np.float32)
    for one in label if isinstance(label, tuple) else (label,):
        target[_index(one, head)] = 1.0
    return target


def _problem_type(labels: Sequence[Any]) -> tuple[str, str]:
    if any(isinstance(label, tuple) for label in labels):
        return MULTI, "labels are lists"
    values = [_as_number(label) for label in labels]
    if all(value is not None for value in values) and any(
        isinstance(label, float) or not float(value).is_integer()
        for label, value in zip(labels, values, strict=True)
        if value is not None
    ):
        return REGRESSION, "labels are numbers with a fraction"
    if all(isinstance(label, int) and not isinstance(label, bool) for label in labels):
        return SINGLE, "labels are whole numbers (problem_type=regression predicts the number)"
    return SINGLE, "each row has one label"


def _regression(config: Config, why: str) -> Head:
    if config.num_labels not in (None, 1):
        raise SwiftFP8Error(
            f"regression predicts one number, not {config.num_labels}",
            where="num_labels",
            fix="leave num_labels out, or set problem_type",
        )
    reason = f"one number for each row: {why}"
    return Head(num_labels=1, problem_type=REGRESSION, labels=("value",), reason=reason)


def _names(labels: Sequence[Any]) -> list[str]:
    """Names of all labels, numbers in their order and others by the alphabet."""
    found = {
        _name(one) for label in labels for one in (label if isinstance(label, tuple) else (label,))
    }
    if len(found) > _MOST:
        raise SwiftFP8Error(
            f"the training rows have {len(found)} different labels",
            where="dataset",
            fix="rename the label's column, as 'data.columns={NAME: label}', or set "
            "problem_type=regression",
        )
    whole = all(re.fullmatch("-?[0-9]+", name) for name in found)  # isdigit takes "²", too
    return sorted(found, key=lambda name: (int(name), name)) if whole else sorted(found)


def _name(label: Any) -> str:
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label)


def _filled(names: list[str], wanted: int) -> list[str]:
    return names + [f"LABEL_{k}" for k in range(len(names), wanted)]


def _index(label: Any, head: Head) -> int:
    name = _name(label)
    if name not in head.labels:
        raise BadRow(
            f"no training row has the label: '{shorten(name, 40)}' is none of "
            f"{_listed(head.labels)}"
        )
    return head.labels.index(name)


def _number(label: Any) -> float:
    value = _as_number(label)
    if value is None:
        raise BadRow(f"the label is no number: {shorten(repr(label), 40)}")
    return value


def _as_number(label: Any) -> float | None:
    if isinstance(label, bool | tuple):
        return None
    try:
        value = float(label)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(shorten(name, 24) for name in names[:_NAMED]) + rest

import json

import numpy as np
import pytest

from swiftfp8.config.schema import Config
from swiftfp8.data.formats import BadRow
from swiftfp8.data.labels import find_head, to_target
from swiftfp8.errors import SwiftFP8Error

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


@pytest.fixture
def head_of(tmp_path):
    def find(labels, **options):
        path = tmp_path / "rows.jsonl"
        rows = [json.dumps({"text": f"row {k}", "label": x}) for k, x in enumerate(labels)]
        path.write_text("\n".join(rows))
        return find_head(Config(task="seq_cls", dataset=str(path), **options))

    return find


@pytest.mark.parametrize(
    ("labels", "problem", "names"),
    [
        (["b", "a", "b"], SINGLE, ("a", "b")),
        ([2, 10, 1], SINGLE, ("1", "2", "10")),
        ([0, 1, 1], SINGLE, ("0", "1")),
        ([True, False], SINGLE, ("false", "true")),
        ([["a", "b"], [], ["c"]], MULTI, ("a", "b", "c")),
        ([["a"], "b"], MULTI, ("a", "b")),
        (["²", "--3", "1"], SINGLE, ("--3", "1", "²")),
        ([0.5, 2, 1], "regression", ("value",)),
        (["1.5", "2"], "regression", ("value",)),
        ([1.0, 2.0], "regression", ("value",)),
    ],
)
def test_what_labels_are_is_found_with_a_reason(head_of, labels, problem, names):
    head = head_of(labels)
    assert (head.problem_type, head.labels, head.num_labels) == (problem, names, len(names))
    assert head.reason.endswith((
        "each row has one label", "labels are lists", "labels are numbers with a fraction",
        "labels are whole numbers (problem_type=regression predicts the number)",
    ))  # fmt: skip


def test_what_the_configuration_says_stands_above(head_of):
    head = head_of([1, 2, 3], problem_type="regression")
    assert head.problem_type == "regression" and "as problem_type says" in head.reason
    assert head_of([0, 2], num_labels=4).labels == ("0", "1", "2", "3")
    assert head_of(["a", "b"], num_labels=3).labels == ("a", "b", "LABEL_2")
    assert head_of(["a", "b"], problem_type=MULTI).problem_type == MULTI


@pytest.mark.parametrize(
    ("labels", "options", "what"),
    [
        (["a", "b", "c"], {"num_labels": 2}, "3 labels, more than num_labels=2"),
        (["a", "a"], {}, "the same label"),
        ([1, 2], {"problem_type": "regression", "num_labels": 2}, "one number, not 2"),
        ([f"name {k}" for k in range(1001)], {}, "1001 different labels"),
    ],
)
def test_contradictions_are_errors(head_of, labels, options, what):
    with pytest.raises(SwiftFP8Error, match=what):
        head_of(labels, **options)


def test_targets_by_kind_of_head(head_of):
    single = head_of(["a", "b"])
    assert to_target("b", single) == 1 and to_target("b", single).dtype == np.int64
    several = head_of([["a"], ["b", "c"]])
    assert to_target(("c", "a"), several).tolist() == [1.0, 0.0, 1.0]
    assert to_target((), several).tolist() == [0.0, 0.0, 0.0]
    number = head_of([0.5, 1.5])
    assert to_target("2.5", number) == 2.5 and to_target(3, number).dtype == np.float32
    with pytest.raises(BadRow, match="'c' is none of a, b"):
        to_target("c", single)
    with pytest.raises(BadRow, match="no number"):
        to_target("many", number)
    with pytest.raises(BadRow, match="2 labels where there must be one"):
        to_target(("a", "b"), single)

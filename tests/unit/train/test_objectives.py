"""Losses and metrics of classifiers, reward models and embeddings, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from swiftfp8.train.objectives import finish, merge
from swiftfp8.train.objectives.classify import Classification
from swiftfp8.train.objectives.embed import Embedding, pool
from swiftfp8.train.objectives.reward import Reward


def answering(logits=None, hidden=None):
    return lambda **_: SimpleNamespace(logits=logits, last_hidden_state=hidden)


def batch_of(rows: int, **more) -> dict[str, torch.Tensor]:
    ids = torch.ones(rows, 4, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def test_single_labels():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])
    targets = torch.tensor([0, 1, 1, 1])
    objective = Classification("single_label_classification", 3)
    batch = batch_of(4, targets=targets)
    outcome = objective.run(answering(logits), batch)
    assert objective.rows(batch) == 4
    assert torch.allclose(outcome.loss, functional.cross_entropy(logits, targets) * 4)
    metrics = finish(objective, merge({}, outcome.sums))
    # label 0: one hit, one false alarm; label 1: two hits, one miss; label 2 never occurs
    assert metrics == {"accuracy": 0.75, "f1": pytest.approx((2 / 3 + 4 / 5) / 2)}


def test_metrics_of_batches_add_up():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 4, generator=generator)
    targets = torch.randint(0, 4, (20,), generator=generator)
    objective = Classification("single_label_classification", 4)

    def sums(part: slice) -> dict[str, torch.Tensor]:
        batch = batch_of(len(targets[part]), targets=targets[part])
        return objective.run(answering(logits[part]), batch).sums

    whole = finish(objective, merge({}, sums(slice(0, 20))))
    parts = merge(merge({}, sums(slice(0, 7))), sums(slice(7, 20)))
    assert finish(objective, parts) == pytest.approx(whole)
    assert finish(objective, {}) == {}


def test_several_labels_are_right_together():
    logits = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    targets = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    objective = Classification("multi_label_classification", 2)
    outcome = objective.run(answering(logits), batch_of(3, targets=targets))
    expected = functional.binary_cross_entropy_with_logits(logits, targets) * 3
    assert torch.allclose(outcome.loss, expected)
    metrics = finish(objective, merge({}, outcome.sums))
    assert metrics == {"accuracy": pytest.approx(2 / 3), "f1": pytest.approx((1.0 + 0.0) / 2)}


def test_numbers():
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(50, generator=generator)
    values = 0.5 * targets + 0.1 * torch.randn(50, generator=generator) + 3
    objective = Classification("regression", 1)
    outcome = objective.run(answering(values[:, None]), batch_of(50, targets=targets))
    assert torch.allclose(outcome.loss, ((values - targets) ** 2).sum())
    metrics = finish(objective, merge({}, outcome.sums))
    assert metrics["mse"] == pytest.approx(float(((values - targets) ** 2).mean()), rel=1e-5)
    assert metrics["pearson"] == pytest.approx(np.corrcoef(values, targets)[0, 1], rel=1e-5)


def test_numbers_that_are_all_the_same_have_no_correlation():
    objective = Classification("regression", 1)
    batch = batch_of(3, targets=torch.ones(3))
    metrics = finish(objective, merge({}, objective.run(answering(torch.ones(3, 1)), batch).sums))
    assert metrics == {"mse": 0.0, "pearson": 0.0}


def test_rewards():
    scores = torch.tensor([[1.0], [0.0], [-1.0], [0.5]])  # two chosen answers, two rejected ones
    outcome = Reward().run(answering(scores), batch_of(4))
    margins = torch.tensor([2.0, -0.5])
    assert torch.allclose(outcome.loss, -functional.logsigmoid(margins).sum())
    assert finish(Reward(), merge({}, outcome.sums)) == {
        "rewards/chosen": 0.5,
        "rewards/rejected": -0.25,
        "rewards/accuracies": 0.5,
        "rewards/margins": 0.75,
    }
    centred = Reward(center=0.1).run(answering(scores), batch_of(4))
    assert float(centred.loss - outcome.loss) == pytest.approx(0.1 * (0.0**2 + 0.5**2))


@pytest.mark.parametrize(
    ("pooling", "expected"), [("cls", [1.0, 0.0]), ("last_token", [0.0, 3.0]), ("mean", [1.0, 3.0])]
)
def test_pooling_leaves_padding_out(pooling, expected):
    hidden = torch.tensor([[[1.0, 0.0], [0.0, 3.0], [50.0, 50.0]]])
    vector = pool(hidden, torch.tensor([[1, 1, 0]]), pooling)
    assert torch.allclose(vector, functional.normalize(torch.tensor([expected]), dim=-1))


def test_embeddings_are_told_from_the_other_candidates():
    vectors = functional.normalize(
        torch.tensor([[1.0, 0.1], [0.0, 1.0], [1.0, 0.0], [0.3, 1.0], [-1.0, 0.2]]), dim=-1
    )
    hidden = vectors[:, None].expand(5, 4, 2)
    same = torch.eye(2, 3, dtype=torch.bool)
    outcome = Embedding("mean", 0.5).run(answering(hidden=hidden), batch_of(5, same=same))
    logits = vectors[:2] @ vectors[2:].t() / 0.5
    expected = functional.cross_entropy(logits, torch.tensor([0, 1]), reduction="sum")
    assert torch.allclose(outcome.loss, expected)
    metrics = finish(Embedding("mean", 0.5), merge({}, outcome.sums))
    assert (metrics["accuracy"], metrics["mrr"]) == (1.0, 1.0)
    # a candidate that is word for word the positive is no negative
    doubled = same.clone()
    doubled[0, 1] = True
    less = Embedding("mean", 0.5).run(answering(hidden=hidden), batch_of(5, same=doubled))
    assert less.loss < outcome.loss

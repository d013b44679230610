"""Which calls may use a layer's CUDA graphs, without a GPU: nothing is recorded here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swiftfp8.precision.kernels import graphs
from swiftfp8.precision.kernels.install import _is_recordable


class Recorded:
    """A graph whose work was done when it was recorded."""

    def replay(self) -> None:
        """Nothing to do again."""


def made_pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pair on a stand-in for a layer: y = 2 x, dx = 2 dy."""
    layer = SimpleNamespace(
        forward=lambda x, *_, **__: (2 * x, object()),
        backward=lambda dy, *_, **__: (2 * dy, []),
    )
    monkeypatch.setattr(graphs, "decoder", layer)
    weights = SimpleNamespace(groups=(), recompute="none", adapter_tensors=list)
    pool = graphs.GraphPool()
    monkeypatch.setattr(pool, "record", lambda work: (Recorded(), work()))
    return graphs._Pair("shape", pool, weights, None, lambda *_: None, need_dx=True)


def test_a_graph_is_open_until_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = made_pair(monkeypatch)
    x = torch.ones(1, 2, 4, requires_grad=True)
    y = graphs._Graphed.apply(x, pair)
    assert pair.is_open() and not pair.pool.is_free("another shape")
    y.sum().backward()
    assert not pair.is_open() and pair.pool.is_free("another shape")


def test_a_forward_pass_that_is_dropped_leaves_the_graph_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = made_pair(monkeypatch)
    y = graphs._Graphed.apply(torch.ones(1, 2, 4, requires_grad=True), pair)
    assert pair.is_open()
    del y
    assert not pair.is_open() and pair.pool.is_free("another shape")


def test_a_layer_that_no_gradient_reaches_runs_without_a_graph() -> None:
    """Below the first trained layer nothing is kept for a backward pass that never comes."""
    weights: Any = SimpleNamespace(groups=(), recompute="none", adapter_tensors=list)
    layer = graphs.LayerGraphs(weights, graphs.GraphPool())
    for _ in range(5):
        x = torch.ones(1, 2, 4)
        assert layer.run(x, None, None, lambda *_: None, rotate=False) is None
    assert not layer.pool.shapes and not layer.pool.recorded


def test_tensors_that_attention_never_reads_do_not_keep_a_call_from_its_graph() -> None:
    x: Any = SimpleNamespace(is_cuda=True)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    unread = {"position_ids": torch.arange(4), "num_items_in_batch": torch.tensor(7)}
    assert _is_recordable(x, attend, unread)
    assert not _is_recordable(x, attend, {**unread, "cu_seq_lens_q": torch.arange(2)})

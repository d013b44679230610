"""Pieces computed in threads: in order, a few ahead, and nothing left running."""

import threading
import time
from pathlib import Path

import pytest
import torch
from export_kit import save_model

from swiftfp8.export.quantize import e4m3_to_float32
from swiftfp8.export.source import open_source
from swiftfp8.export.stream import in_order, pieces_of


def test_results_come_in_order_whatever_takes_longest() -> None:
    def work(number: int) -> int:
        time.sleep(0.01 * (number % 3))
        return number

    assert list(in_order(range(40), work)) == list(range(40))


def test_only_a_few_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> object:
        for number in range(1000):
            taken.append(number)
            yield number

    results = in_order(items(), lambda number: number)
    assert next(results) == 0
    assert len(taken) < 100
    results.close()


def test_an_error_reaches_the_caller_and_no_thread_is_left() -> None:
    def work(number: int) -> int:
        if number == 5:
            raise ValueError("planted")
        return number

    found = []
    with pytest.raises(ValueError, match="planted"):
        for result in in_order(range(100), work):
            found.append(result)
    assert found == [0, 1, 2, 3, 4]
    assert not [t for t in threading.enumerate() if t.name.startswith("swiftfp8-export")]


def test_threads_compute_with_one_core_and_the_caller_keeps_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert set(in_order(range(4), lambda _: torch.get_num_threads())) == {1}
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
    finally:
        torch.set_num_threads(before)


def test_pieces_cover_every_tensor_once(tmp_path: Path) -> None:
    source = open_source(save_model(tmp_path, "llama", intermediate_size=8192))
    rows: dict[str, list[tuple[int, int]]] = {}
    nbytes = 0
    for piece in pieces_of(source, source.tensors, lambda name: 128):
        assert piece.start % 128 == 0
        assert piece.last == (piece.stop == source.tensors[piece.name].rows)
        rows.setdefault(piece.name, []).append((piece.start, piece.stop))
        nbytes += piece.nbytes
    assert nbytes == source.nbytes
    assert list(rows) == list(source.tensors)
    assert len(rows["model.layers.0.mlp.up_proj.weight"]) == 2
    for name, parts in rows.items():
        assert [start for start, _ in parts] == [0, *[stop for _, stop in parts[:-1]]]
        assert parts[-1][1] == source.tensors[name].rows


def test_every_e4m3_value_is_read_exactly() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = data.to(torch.float32)
    finite = ~torch.isnan(expected)
    assert torch.equal(e4m3_to_float32(data)[finite], expected[finite])
    assert torch.equal(e4m3_to_float32(data[128:129]).signbit(), torch.tensor([True]))

"""A checkpoint's tensors, piece by piece: read, computed and handed on at the same time.

Threads read and compute some pieces ahead while the caller writes the ones before, so that a disk
and the processors (or a GPU) work together and memory holds a few pieces, whatever the model's
size. Results come in the order of the pieces. torch lets other threads run while it computes, and
every thread computes with one core: that is faster on small pieces than all cores on one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from swiftfp8.export.checkpoint_io import FLOATS
from swiftfp8.export.quantize import require_finite, slabs
from swiftfp8.export.source import Source

_GPU_THREADS = 4  # copying from the file cache takes longer than the GPU's part

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows [start, stop) of a source tensor; `nbytes` is what reading them takes."""

    name: str
    start: int
    stop: int
    last: bool
    nbytes: int


def pieces_of(
    source: Source,
    names: Iterable[str],
    block_rows: Callable[[str], int] = lambda name: 1,
    device: torch.device | str = "cpu",
) -> Iterator[Piece]:
    """The pieces of tensors, one tensor after the other, in whole blocks of rows."""
    for name in names:
        spec = source.checkpoint.specs[name]
        for start, stop in slabs(spec.rows, spec.columns, block_rows(name), device):
            yield Piece(
                name=name,
                start=start,
                stop=stop,
                last=stop == spec.rows,
                nbytes=(stop - start) * spec.row_bytes,
            )


def in_order(
    items: Iterable[Item],
    work: Callable[[Item], Result],
    device: torch.device | str = "cpu",
) -> Iterator[Result]:
    """`work` of every item, in order, computed in threads a few items ahead of the caller."""
    own = torch.get_num_threads()
    threads = _GPU_THREADS if torch.device(device).type == "cuda" else own + 1  # one of them reads
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, "swiftfp8-export", initializer=_use_one_core)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(own)  # threads that start later take the last number that was set


def rounded(source: Source, piece: Piece, device: torch.device | str) -> Tensor:
    """A piece of a merged tensor as an unquantized export holds it.

    Raises:
        SwiftFP8Error: it holds NaN, or what is infinite once it is rounded.
    """
    merged = source.checkpoint.rows(piece.name, piece.start, piece.stop, device)
    result = source.rounded(piece.name, merged)
    if source.tensors[piece.name].dtype in FLOATS and result.numel():
        require_finite(torch.stack(torch.aminmax(result)), piece.name)
    return result


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in CPU memory; through page-locked memory, from a GPU."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def _use_one_core() -> None:
    torch.set_num_threads(1)

"""How many CPU threads a model is worth.

Waking a second thread costs more than a matmul of a tiny model takes. Whoever sets OMP_NUM_THREADS
decides that alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftfp8.errors import SwiftFP8Error

# Two threads were 5 times slower than one on 2.9e6 parameters, on two cores.
ONE_THREAD_PARAMS = 20_000_000


def cpu_threads(parameters: int, device: str) -> int | None:
    """One thread for a tiny model on a CPU; None leaves torch's choice."""
    return 1 if device == "cpu" and parameters < ONE_THREAD_PARAMS else None


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Run with so many CPU threads, unless that is None or the user set their number."""
    if threads is None or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def threads_for(model_dir: Path) -> Iterator[None]:
    """Run with the threads that the model of a directory is worth."""
    import torch

    with limited_threads(None if torch.cuda.is_available() else _threads_of(model_dir)):
        yield


def _threads_of(model_dir: Path) -> int | None:
    """By the headers of its safetensors files; weights in other files leave torch's choice.

    So do damaged ones: who loads them says what is wrong, with or without a GPU.
    """
    from swiftfp8.export.checkpoint_io import read_header

    files = list(model_dir.glob("*.safetensors"))
    try:
        specs = [spec for file in files for spec, _ in read_header(file)]
    except SwiftFP8Error:
        return None
    return cpu_threads(sum(spec.rows * spec.columns for spec in specs), "cpu") if files else None

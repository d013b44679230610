"""Work on rows spread over forked processes (`data.num_proc`), results in the rows' order.

A forked process has the rows and the tokenizer already, so only numbers of rows go to it, and what
it made comes back. Its core's own threads are switched off: there are as many processes as cores.
Other systems than Linux don't fork safely; there all is done in this process.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from swiftfp8.errors import RunFailed

log = logging.getLogger(__name__)
_MOST = 16  # processes: reading, which is one, keeps no more busy
_EACH = 4_000_000  # characters that are worth a process
_CHUNK = 1024  # rows at most that a process does at once
_SAMPLE = 256  # rows whose size stands for all
_THREADS = "TOKENIZERS_PARALLELISM"
T, R = TypeVar("T"), TypeVar("R")


def count_processes(asked: int | None, rows: Sequence[Any]) -> int:
    """How many processes the rows get: `asked`, or as many as cores and the rows' size are for.

    `rows` have a `content`, whose printed form tells the size.
    """
    if sys.platform != "linux":
        if asked is not None and asked > 1:
            log.warning("data.num_proc=%d: rows are spread over processes on Linux alone", asked)
        return 1
    if asked is not None:
        return max(1, min(asked, len(rows)))
    sample = rows[:: max(1, len(rows) // _SAMPLE)]
    size = sum(len(repr(row.content)) for row in sample) * len(rows) // max(1, len(sample))
    return max(1, min(len(os.sched_getaffinity(0)), _MOST, size // _EACH))


def spread(
    work: Callable[[Sequence[T]], Iterable[R]], rows: Sequence[T], processes: int
) -> Iterator[R]:
    """What `work(rows)` gives, in its order, by that many processes.

    `work` is called with parts of the rows, and keeps between calls what it learns in its process.

    Raises:
        RunFailed: a process was killed; and whatever `work` raises, for the first part that does.
    """
    if processes == 1:
        yield from work(rows)
        return
    size = max(1, min(_CHUNK, len(rows) // (processes * 4)))
    parts = [range(len(rows))[at : at + size] for at in range(0, len(rows), size)]
    with (
        _single_threaded(),
        ProcessPoolExecutor(processes, get_context("fork"), _begin, (work, rows)) as pool,
    ):
        try:
            made = deque(pool.submit(_work, part) for part in parts)
            while made:
                yield from made.popleft().result()
        except BrokenProcessPool as error:
            raise RunFailed(
                f"one of {processes} processes that tokenize was killed",
                where="data.num_proc",
                fix="if memory ran out (dmesg tells), set a lower data.num_proc",
            ) from error
        except BaseException:
            # A pool waits for the work that it has begun; a second Ctrl-C would break that wait,
            # and Python's exit wait for ever.
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise


_given: tuple[Callable[[Sequence[Any]], Iterable[Any]], Sequence[Any]]  # of a forked process


def _begin(work: Callable[[Sequence[Any]], Iterable[Any]], rows: Sequence[Any]) -> None:
    global _given
    _given = work, rows
    gc.freeze()  # or a look for garbage would copy all of the parent's memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _work(part: range) -> list[Any]:
    work, rows = _given
    return list(work(rows[part.start : part.stop]))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Tell tokenizers to use no threads beside; it looks when the process forks."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before

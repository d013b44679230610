"""Ctrl-C and SIGTERM ask a run to finish its step and save; a second Ctrl-C ends it at once.

The death of a process that prepares rows waits for the end of the step too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_MESSAGE = b"\nfinishing this step, then saving a checkpoint; Ctrl-C again stops at once\n"


class StopRequest:
    """A context in which the first signal sets `requested` instead of ending the process.

    Outside the main thread Python allows no handlers: the signals then keep their usual effect.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = True
        os.write(2, _MESSAGE)  # a handler may interrupt any print: no buffered stream here


class WorkerDeaths:
    """Keeps PyTorch's handler of SIGCHLD from raising in the middle of a step.

    That handler says which loader process died, wherever the program is; but only between steps
    can what was trained be saved. So between the uses of `heard` it is called, as any other handler
    that is in its place, and what it raises waits.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # what is called by ours
        self._death: RuntimeError | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Raise what was held back, and what comes; hold back what follows."""
        self.release()
        death, self._death = self._death, None
        if death is not None:
            raise death
        try:
            yield
        finally:
            handler = signal.getsignal(signal.SIGCHLD)
            if callable(handler) and threading.current_thread() is threading.main_thread():
                self._handler = handler
                signal.signal(signal.SIGCHLD, self._hold_back)

    def release(self) -> None:
        """Give the handler its place again."""
        if self._handler is not None:
            signal.signal(signal.SIGCHLD, self._handler)
            self._handler = None

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as death:
            self._death = death


def ignore_interrupts() -> None:
    """For data loader processes: the terminal sends them Ctrl-C too, but the trainer decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

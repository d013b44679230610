"""Ctrl-C and SIGTERM ask a run to finish its step and save; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
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


def ignore_interrupts() -> None:
    """For data loader processes: the terminal sends them Ctrl-C too, but the trainer decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

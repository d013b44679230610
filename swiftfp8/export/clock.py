"""Where an export's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_NOTHING = 0.001  # a stage that had nothing to do


class Clock:
    """Seconds since it was made, and of each stage by name where it had something to do."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return time.monotonic() - self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what happens inside to the stage `name`."""
        began = self.seconds
        yield
        spent = self.seconds - began
        if spent > _NOTHING:
            self.stages[name] = self.stages.get(name, 0.0) + spent

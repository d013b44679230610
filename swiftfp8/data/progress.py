"""A progress bar for tokenizing, shown on a terminal and only where the work is long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHOW_FROM = 4_000  # rows: about a second


@contextmanager
def tokenizing(rows: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with each number of rows done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if rows < _SHOW_FROM or not console.is_terminal:
        yield lambda done: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokenizing", total=rows)
        yield lambda done: progress.advance(task, done)

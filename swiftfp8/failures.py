"""How a command ends: exit codes, and one screen of text in place of a traceback.

0 done; 1 a run that failed, or a bug; 2 a mistake of the user's; 130 interrupted. With
`SWIFTFP8_DEBUG=1` the traceback is printed as well.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec

import typer

from swiftfp8.errors import SwiftFP8Error

P = ParamSpec("P")


def guarded(command: Callable[P, int | None]) -> Callable[P, None]:
    """Wrap a command: print what it raises, and exit with the code that belongs to it."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs) or 0
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 1
        except (Exception, KeyboardInterrupt) as error:
            code = report(error)
        if code:
            raise typer.Exit(code)

    return run


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, so that what was begun is removed."""
    own = os.getpid()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if os.getpid() == own:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a helper process that inherited this handler
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_signal)


def report(error: BaseException) -> int:
    """Print an error to stderr; return the exit code it stands for."""
    if os.environ.get("SWIFTFP8_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, OSError) and isinstance(error.filename, str | bytes) and error.strerror:
        error = SwiftFP8Error(
            f"a file can't be used: {error.strerror}",
            where=os.fsdecode(error.filename),
            fix="see that it is there and that you may read or write it",
        )
    if isinstance(error, SwiftFP8Error):
        problems = getattr(error, "problems", (error,))
        print("\n\n".join(f"error: {problem}" for problem in problems), file=sys.stderr)
        return error.exit_code
    said = "\n".join(str(error).strip().splitlines()[:20]) or "no message"
    print(f"error: {type(error).__name__}: {said}", file=sys.stderr)
    print("  this is a bug, or an error of a library", file=sys.stderr)
    print("  fix:   set SWIFTFP8_DEBUG=1 for the traceback", file=sys.stderr)
    return 1

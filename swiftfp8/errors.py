"""The two ways a command ends badly: the user's mistake (exit 2) and a failed run (exit 1).

Both carry what went wrong, where, and how to mend it, so that the command line can print one
screen of text without a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class SwiftFP8Error(Exception):
    """A mistake that the user can mend: exit code 2.

    Args:
        what: what is wrong, one sentence.
        where: file and line, key, or module that it concerns.
        fix: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class SwiftFP8Errors(SwiftFP8Error):
    """Several mistakes found in one pass, reported together."""

    def __init__(self, problems: Sequence[SwiftFP8Error]) -> None:
        assert problems
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class RunFailed(SwiftFP8Error):
    """A run that began and could not end well: exit code 1, the run directory is kept."""

    exit_code = 1


@contextmanager
def collected(problems: list[SwiftFP8Error]) -> Iterator[None]:
    """Put the user's mistakes that are raised inside into `problems`, and go on behind it."""
    try:
        yield
    except RunFailed:
        raise
    except SwiftFP8Error as error:
        problems += getattr(error, "problems", (error,))


def raise_all(problems: Sequence[SwiftFP8Error]) -> None:
    """Raise nothing for no problem, the problem itself for one, all of them together for more."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise SwiftFP8Errors(problems)

"""A directory that appears whole or not at all.

Everything is written to `<name>.partial-<pid>` beside the target and renamed at the end; an error
or Ctrl-C removes it. A process that is killed leaves it, and a later one may go on with it. An old
export is replaced only after the new one is complete.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from swiftfp8.errors import RunFailed, SwiftFP8Error

REPORT_NAME = "export_report.json"
"""The file that tells an export from any other directory."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOO_LARGE = errno.EFBIG
_LONGEST = 230  # of the 255 bytes that file systems allow; `.partial-<pid>-<n>` is added
_SLACK = 64 << 20  # configuration, tokenizer, file system overhead
_GIB = 2**30


@contextmanager
def staged(
    target: Path,
    *,
    overwrite: bool,
    needed_bytes: int,
    adopt: Path | None = None,
    keep: Callable[[BaseException, Path], bool] = lambda error, partial: False,
) -> Iterator[Path]:
    """Yield the directory to write into; rename it to `target` when the body ends well.

    `adopt` is the directory of an earlier attempt, to be used in place of a new one. `keep` says
    whether to leave the directory for a later attempt, given the error that ended the body and the
    directory.

    Raises:
        SwiftFP8Error: `target` is in use, can't be written, or the disk is or gets full.
    """
    target = Path(os.path.abspath(target))
    check_target(target, overwrite=overwrite)
    created = _make_parents(target.parent)
    partial = adopt or _new_name(target)
    try:
        check_space(target.parent, needed_bytes)
        if adopt is None:
            partial.mkdir()
        yield partial
        _put_in_place(partial, target, overwrite=overwrite)
    except BaseException as error:
        if not keep(error, partial):
            shutil.rmtree(partial, ignore_errors=True)
            for parent in created:
                _remove_empty(parent)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _no_space(target.parent, needed_bytes) from error
        if isinstance(error, OSError) and error.errno == _TOO_LARGE:
            raise SwiftFP8Error(
                "a file grew larger than the file system, or `ulimit -f`, allows",
                where=str(partial),
                fix="raise that limit, or set a smaller export.max_shard_size",
            ) from error
        raise


def partial_directories(target: Path) -> list[Path]:
    """What earlier attempts at `target` have left, or running ones are writing; newest first."""
    target = Path(os.path.abspath(target))
    found = [
        path
        for path in target.parent.glob(f"{glob.escape(target.name)}.partial-*")
        if path.is_dir() and path.name.rpartition("-")[2].isdecimal()
    ]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def is_interruption(error: BaseException) -> bool:
    """Whether what was written until this error is good: Ctrl-C, or a disk that takes no more."""
    full = isinstance(error, OSError) and error.errno in (*_FULL, _TOO_LARGE)
    return full or isinstance(error, KeyboardInterrupt)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that is in use, or that an overwrite would be a disaster for."""
    if len(os.fsencode(target.name)) > _LONGEST:
        raise SwiftFP8Error(
            f"the name of the export directory is too long: {len(os.fsencode(target.name))} bytes",
            where=str(target),
            fix=f"take a name of at most {_LONGEST} bytes",
        )
    if not os.path.lexists(target) or _is_empty(target):
        return
    if not overwrite:
        raise SwiftFP8Error(
            "the export directory exists already",
            where=str(target),
            fix="choose another export_dir, or set export.overwrite=true to replace it",
        )
    # Not config.json or adapter_config.json: models and a run's checkpoints have those too.
    if not (target / REPORT_NAME).is_file() or target.is_symlink():
        raise SwiftFP8Error(
            "export.overwrite replaces earlier exports only; this holds something else",
            where=str(target),
            fix="choose another export_dir, or remove it yourself",
        )


def check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to begin what the disk can't hold."""
    if shutil.disk_usage(directory).free < needed_bytes + _SLACK:
        raise _no_space(directory, needed_bytes)


def _no_space(directory: Path, needed_bytes: int) -> SwiftFP8Error:
    free = shutil.disk_usage(directory).free
    return SwiftFP8Error(
        f"no disk space: the export needs {(needed_bytes + _SLACK) / _GIB:.2f} GiB, "
        f"{free / _GIB:.2f} GiB are free",
        where=str(directory),
        fix="free some space, or set export_dir to another disk",
    )


def _new_name(target: Path, kind: str = "partial") -> Path:
    """A name that no earlier attempt has, by a process of the same number (as containers have)."""
    name = f"{target.name}.{kind}-{os.getpid()}"
    tries = (target.with_name(name if n == 0 else f"{name}-{n}") for n in count())
    return next(path for path in tries if not os.path.lexists(path))


def _put_in_place(partial: Path, target: Path, *, overwrite: bool) -> None:
    check_target(target, overwrite=overwrite)  # another export may have finished meanwhile
    old = _new_name(target, "old")
    try:
        if overwrite and os.path.lexists(target):
            os.rename(target, old)
        os.rename(partial, target)
    except BaseException:  # Ctrl-C too: the old one must not stay under another name
        if partial.exists() and old.exists():
            _put_back(old, target)
        else:
            shutil.rmtree(old, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _put_back(old: Path, target: Path) -> None:
    try:
        os.rename(old, target)
    except BaseException as error:
        if not old.exists():  # Ctrl-C came when it was done
            raise
        raise RunFailed(
            "the export was not replaced, and could not get its name back",
            where=str(old),
            fix=f"rename that directory to {target.name}: it is whole",
        ) from error


def _make_parents(parent: Path) -> list[Path]:
    """Create missing parents; returns those created, deepest first."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SwiftFP8Error(
            f"can't create the export directory: {error.strerror}", where=str(parent)
        ) from error
    if not os.access(parent, os.W_OK):
        raise SwiftFP8Error("the folder is not writable", where=str(parent))
    return missing


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _remove_empty(path: Path) -> None:
    if _is_empty(path):
        path.rmdir()

"""Which directory a run gets: a new one, a named one that is free, or that of the run resumed.

A run takes an exclusive lock on `<run>/.lock` (held by the process, so a killed one frees it) and
never mixes with another: a folder that is in use, finished, or not ours is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.train.checkpoint import clean_leftovers, find_resume, newest_checkpoint

RESULT_FILE = "result.json"
_LOCK_FILE = ".lock"
_LONGEST_NAME = 240  # bytes; file systems take 255, a sweep's number included
_held: dict[Path, int] = {}  # locks of this process, by directory


def check_run_directory(config: Any) -> None:
    """Find out before anything is loaded that `start_run` would refuse; nothing is made.

    Raises:
        SwiftFP8Error: what `start_run` raises.
    """
    if config.resume_from_checkpoint:
        run_dir = find_resume(Path(config.resume_from_checkpoint)).parent
        if (run_dir / "resolved.yaml").is_file():
            _refuse_in_use(run_dir)
            return
    _check_place(config)
    run_dir = Path(config.output_dir) / (config.run_name or "")
    if config.run_name and run_dir.exists():
        _refuse_occupied(run_dir)
        _refuse_in_use(run_dir)
        _refuse_trained(run_dir)
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise _no_directory(Path(config.output_dir), f"{there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _no_directory(Path(config.output_dir), f"{there} can't be written to")


def choose_directory(config: Any, source_name: str, now: datetime) -> Path:
    """Create, or on a resume find, the directory, and lock it.

    Raises:
        SwiftFP8Error: it is in use, finished, holds something else, or can't be made.
    """
    parent = Path(config.output_dir)
    if config.resume_from_checkpoint:
        run_dir = find_resume(Path(config.resume_from_checkpoint)).parent
        if (run_dir / "resolved.yaml").is_file():  # else: a checkpoint copied out of its run
            _lock(run_dir)
            return run_dir
    _check_place(config)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if config.run_name:
            return _named_directory(parent / config.run_name)
        return _stamped_directory(parent, f"{_slug(source_name)}-{config.task}-{now:%Y%m%d-%H%M%S}")
    except OSError as error:
        raise _no_directory(parent, error.strerror or str(error)) from error


def unused_name(config: Any) -> str | None:
    """What to say of a `run_name` that a resume, which goes on in its own directory, has not."""
    if not (config.resume_from_checkpoint and config.run_name):
        return None
    run_dir = find_resume(Path(config.resume_from_checkpoint)).parent
    if not (run_dir / "resolved.yaml").is_file() or run_dir.resolve().name == config.run_name:
        return None
    return (
        f"run_name={config.run_name} is not used: the run goes on in its own directory, {run_dir}; "
        "for a directory of its own, resume a copy of the checkpoint outside its run"
    )


def release_lock(run_dir: Path) -> None:
    """Give up this process's lock on `run_dir`; no error where it holds none."""
    descriptor = _held.pop(run_dir.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def empty_run(run_dir: Path, *, keep_lock: bool) -> None:
    """Remove the files that a run writes before its first checkpoint, and no others."""
    clean_leftovers(run_dir)
    names = ["resolved.yaml", "overrides.txt", "environment.json", "plan.json"]
    names += ["precision_report.json", "logging.jsonl"] + ([] if keep_lock else [_LOCK_FILE])
    for name in names:
        (run_dir / name).unlink(missing_ok=True)


def resume_command(run_dir: Path, checkpoint: Path | None = None) -> str:
    """The shell command that goes on with the run, from `checkpoint` or from its newest one."""
    config = shlex.quote(f"config={run_dir / 'resolved.yaml'}")
    start = shlex.quote(f"resume_from_checkpoint={checkpoint or run_dir}")
    return f"swiftfp8 train {config} {start}"


def _stamped_directory(parent: Path, name: str) -> Path:
    """Make `name`, or `name-2`, `name-3`, ... where another run began in the same second."""
    number = 1
    while True:
        run_dir = parent / (name if number == 1 else f"{name}-{number}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            number += 1
            continue
        _lock(run_dir)
        return run_dir


def _named_directory(run_dir: Path) -> Path:
    if run_dir.exists():
        _refuse_occupied(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    _lock(run_dir)
    try:
        _refuse_trained(run_dir)
    except SwiftFP8Error:
        release_lock(run_dir)
        raise
    empty_run(run_dir, keep_lock=True)  # a run that died before its first checkpoint
    return run_dir


def _check_place(config: Any) -> None:
    """Refuse a name that no directory can have, and links to nothing on the way to it."""
    name = config.run_name
    if name is not None:
        _check_name(name)
    run_dir = Path(config.output_dir).absolute() / (name or "")
    for folder in (run_dir, *run_dir.parents):
        if folder.is_symlink() and not folder.exists():
            raise SwiftFP8Error(
                f"a link to what is not there: {os.readlink(folder)}",
                where=str(folder),
                fix="make the folder that it points to, or choose another run_name or output_dir",
            )


def _check_name(run_name: str) -> None:
    why, fix = None, "choose another, or leave it out: model, task and time name the run"
    if not run_name.strip(" ."):
        why = "is empty or made of dots"
    elif "/" in run_name:
        why, fix = "has a / in it", "name the run without / and set output_dir to its parent"
    elif "${" in run_name or not run_name.isprintable():  # resolved.yaml could not be read again
        why = "has ${ or a character in it that can't be shown"
    elif len(os.fsencode(run_name)) > _LONGEST_NAME:
        why = f"takes {len(os.fsencode(run_name))} bytes, and a name has at most {_LONGEST_NAME}"
    if why is not None:
        shown = run_name if len(run_name) < 60 else f"{run_name[:50]}..."
        raise SwiftFP8Error(f"run_name '{shown}' {why}", where="run_name", fix=fix)


def _refuse_occupied(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise SwiftFP8Error(
            "run_name is the name of a file", where=str(run_dir), fix="choose another run_name"
        )
    entries = {entry.name for entry in run_dir.iterdir()} - {_LOCK_FILE}
    if entries and "resolved.yaml" not in entries:
        raise SwiftFP8Error(
            "the run directory holds files of something else",
            where=str(run_dir),
            fix="choose another run_name or output_dir",
        )


def _refuse_trained(run_dir: Path) -> None:
    """Refuse a run that is done, or that a resume can go on with."""
    if (run_dir / RESULT_FILE).exists():
        export = f"use what it trained: swiftfp8 export {shlex.quote(f'run={run_dir}')}"
        if (run_dir / "export").exists():
            export = f"use its export, {run_dir / 'export'}"
        raise SwiftFP8Error(
            "the run directory holds a finished run",
            where=str(run_dir),
            fix=f"choose another run_name, or {export}, or train it further: "
            f"{resume_command(run_dir)} with a larger max_steps= or num_train_epochs=",
        )
    if newest_checkpoint(run_dir) is not None:
        raise SwiftFP8Error(
            "the run directory holds an unfinished run",
            where=str(run_dir),
            fix=f"choose another run_name, or go on with it: {resume_command(run_dir)}",
        )


def _no_directory(output_dir: Path, why: str) -> SwiftFP8Error:
    return SwiftFP8Error(
        f"cannot create a run directory: {why}",
        where=str(output_dir.absolute()),
        fix="set output_dir to a folder that can be written",
    )


def _lock(run_dir: Path) -> None:
    key = run_dir.resolve()
    if key in _held:  # this process began it: a second start is a second run in one directory
        raise _in_use(run_dir, str(os.getpid()))
    descriptor = os.open(run_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip()
        os.close(descriptor)
        raise _in_use(run_dir, holder) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    _held[key] = descriptor


def _refuse_in_use(run_dir: Path) -> None:
    """Refuse a directory whose lock is held, without taking it."""
    lock = run_dir / _LOCK_FILE
    if run_dir.resolve() in _held:
        raise _in_use(run_dir, str(os.getpid()))
    if not lock.is_file():
        return
    with lock.open("rb") as file:  # closing it gives the lock up
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(run_dir, file.read(32).decode(errors="replace").strip()) from error


def _in_use(run_dir: Path, holder: str) -> SwiftFP8Error:
    return SwiftFP8Error(
        f"the run directory is in use by process {holder or 'unknown'}",
        where=str(run_dir),
        fix="wait for it to end, or choose another run_name",
    )


def _slug(name: str) -> str:
    return re.sub(r"[^\w.\-]+", "-", name).strip("-.") or "model"

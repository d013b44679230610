"""Checkpoints that are whole or not there, and the way back from one.

A checkpoint is written under a temporary name with a manifest of its files and sizes
(`swiftfp8.json`, written last) and then renamed, so a process killed at any moment leaves no
`checkpoint-N` that only looks whole. `best` and `last` are relative links, replaced atomically.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from swiftfp8.errors import RunFailed, SwiftFP8Error

MANIFEST = "swiftfp8.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_TEMPORARY = ".tmp-"
_SUPERSEDED = "superseded-"
# Parts of torch.save's messages on a full disk.
_TORCH_WRITE = ("PytorchStreamWriter", "inline_container", "iostream error")


def write_checkpoint(
    run_dir: Path, step: int, fill: Callable[[Path], None], manifest: Mapping[str, Any]
) -> Path:
    """Write `checkpoint-<step>` by calling `fill(folder)`, and point `last` at it.

    Args:
        run_dir: the run directory.
        step: optimizer steps done.
        fill: writes the checkpoint's files into the folder that it is given.
        manifest: what `swiftfp8.json` says besides the list of files.

    Raises:
        RunFailed: the files could not be written; nothing of them is left.
    """
    target = run_dir / f"checkpoint-{step}"
    part = run_dir / f"{_TEMPORARY}{target.name}"
    try:
        if part.exists():
            shutil.rmtree(part)
        part.mkdir()
        fill(part)
        files = {name: (part / name).stat().st_size for name in sorted(_files_of(part))}
        text = json.dumps({**manifest, "step": step, "files": files}, indent=2)
        (part / MANIFEST).write_text(text + "\n", encoding="utf-8")
        _put_in_place(part, target)
        link(run_dir, "last", target)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        if not is_write_error(error):
            raise
        raise _cannot_write(run_dir, target, error) from error
    except BaseException:  # a second Ctrl-C
        shutil.rmtree(part, ignore_errors=True)
        raise
    return target


def find_resume(path: Path) -> Path:
    """The whole checkpoint that `path` means: a checkpoint itself, or a run's newest one.

    Raises:
        SwiftFP8Error: there is none.
    """
    path = Path(path)
    if not path.is_dir():
        raise SwiftFP8Error(
            "the checkpoint to resume from does not exist",
            where=f"resume_from_checkpoint={path}",
            fix="give a run directory or one of its checkpoint-N directories",
        )
    real = path.resolve()
    if _NAME.fullmatch(real.name) or (real / MANIFEST).exists():
        fault = why_not_whole(real)
        if fault is None:
            return real if path.is_symlink() else path
        raise SwiftFP8Error(
            f"the checkpoint is not whole: {fault}",
            where=str(path),
            fix="resume from the run directory: its newest whole checkpoint is taken",
        )
    newest = newest_checkpoint(path)
    if newest is None:
        broken = max(_numbered(path), default=None)
        fault = f": {broken[1].name} is not whole, {why_not_whole(broken[1])}" if broken else ""
        raise SwiftFP8Error(
            f"no whole checkpoint to resume from{fault}",
            where=str(path),
            fix="give a run directory that holds a checkpoint-N, or start again without "
            "resume_from_checkpoint",
        )
    return newest


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The whole checkpoint with the most steps in `run_dir`."""
    for _, path in sorted(_numbered(run_dir), reverse=True):
        if why_not_whole(path) is None:
            return path
    return None


def older_than(checkpoint: Path) -> list[Path]:
    """The whole checkpoints beside `checkpoint` that have fewer steps, the newest first."""
    own = _NAME.fullmatch(checkpoint.name)
    below = [(n, path) for n, path in _numbered(checkpoint.parent) if own and n < int(own[1])]
    return [path for _, path in sorted(below, reverse=True) if why_not_whole(path) is None]


def why_not_whole(checkpoint: Path) -> str | None:
    """What is missing from a checkpoint, or None where all its files are there."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    if not isinstance(files, dict):
        return f"{MANIFEST} lists no files"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What `swiftfp8.json` of a whole checkpoint says."""
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def link(run_dir: Path, name: str, checkpoint: Path | None) -> None:
    """Point `<run>/<name>` at a checkpoint by a relative link, atomically; None removes it."""
    path = run_dir / name
    if checkpoint is None:
        path.unlink(missing_ok=True)
        return
    part = run_dir / f"{_TEMPORARY}{name}"
    part.unlink(missing_ok=True)
    part.symlink_to(checkpoint.name)
    os.replace(part, path)


def rotate(run_dir: Path, keep: int) -> list[Path]:
    """Delete the oldest checkpoints beyond `keep`, never those that `best` and `last` name."""
    held = {(run_dir / name).resolve() for name in ("best", "last")}
    loose = [path for _, path in sorted(_numbered(run_dir)) if path.resolve() not in held]
    deleted = loose[: max(0, len(loose) - keep)]
    for path in deleted:
        # Renamed first: a kill in the middle of deletion leaves nothing that looks whole.
        gone = run_dir / f"{_TEMPORARY}gone-{path.name}"
        os.rename(path, gone)
        shutil.rmtree(gone)
    return deleted


def set_aside_after(run_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints later than `step` to `superseded-checkpoint-N`, and return them.

    Going back to an older checkpoint starts another course; the abandoned one is the user's to
    delete, but must not be taken for this one's.
    """
    aside = []
    for number, path in sorted(_numbered(run_dir)):
        if number <= step:
            continue
        target = run_dir / f"{_SUPERSEDED}{path.name}"
        if target.exists():
            shutil.rmtree(target)
        os.rename(path, target)
        aside.append(target)
    return aside


def clean_leftovers(run_dir: Path) -> None:
    """Remove what a killed process left under temporary names."""
    for path in run_dir.glob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_write_error(error: BaseException) -> bool:
    """Whether an exception says that files could not be written.

    torch and safetensors wrap the system's error in exceptions of their own.
    """
    if isinstance(error, OSError):
        return True
    if type(error).__name__ == "SafetensorError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TORCH_WRITE)


def _put_in_place(part: Path, target: Path) -> None:
    if target.exists():
        old = target.with_name(f"{_TEMPORARY}old-{target.name}")
        os.rename(target, old)
        os.rename(part, target)
        shutil.rmtree(old)
    else:
        os.rename(part, target)


def _cannot_write(run_dir: Path, target: Path, error: Exception) -> RunFailed:
    newest = newest_checkpoint(run_dir)
    kept = f"{newest.name} is intact" if newest else "no earlier checkpoint exists"
    reason = getattr(error, "strerror", None) or "the data could not be written"
    try:
        free = f"{shutil.disk_usage(run_dir).free / 2**30:.1f} GiB free"
    except OSError:
        free = "free space unknown"
    again = f"resume with resume_from_checkpoint={newest}" if newest else "start the run again"
    return RunFailed(
        f"could not write {target.name}: {reason} ({free}); {kept}",
        where=str(target),
        fix="make room on the disk (a lower train.save_total_limit keeps fewer checkpoints), then "
        + again,
    )


def _files_of(folder: Path) -> Iterable[str]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _numbered(run_dir: Path) -> list[tuple[int, Path]]:
    found = []
    if run_dir.is_dir():
        for path in run_dir.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match.group(1)), path))
    return found

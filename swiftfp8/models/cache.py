"""Model directories that are made once and kept: converted GGUF files, extracted text models.

They live in `~/.cache/swiftfp8` (or SWIFTFP8_CACHE), under a name with a key of what they were made
from, and appear there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError

from swiftfp8.config.paths import cache_dir
from swiftfp8.errors import SwiftFP8Error


def cached_model(
    kind: str, label: str, made_from: Iterable[Path], make: Callable[[Path], None]
) -> Path:
    """The directory that `make(folder)` fills, made at the first call for these files.

    The key covers path, size and modification time of `made_from`, so that a changed file is
    converted anew. `make` writes into a temporary folder, which is renamed once it is complete.
    """
    parent = cache_dir() / kind
    target = parent / f"{safe_name(label)}-{_key(made_from)}"
    if target.is_dir():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    except OSError as error:
        raise _no_room(parent, error) from error
    try:
        make(scratch)
        _publish(scratch, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(parent, error) from error
        raise
    except SafetensorError as error:  # how safetensors reports that a file can't be written
        raise _no_room(parent, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # gone already where it was published
    return target


def safe_name(text: str) -> str:
    """`text` as a file name: letters, digits, dot, dash and underscore only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


def _publish(scratch: Path, target: Path) -> None:
    """Rename `scratch` to `target`; where another process was first, its result is as good."""
    scratch.chmod(0o755)
    try:
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def _no_room(folder: Path, error: Exception) -> SwiftFP8Error:
    return SwiftFP8Error(
        f"can't write to the model cache: {getattr(error, 'strerror', None) or error}",
        where=str(folder),
        fix="free some space, or set SWIFTFP8_CACHE to a folder on another disk",
    )

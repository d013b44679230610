"""Whether a checkpoint's files, all there and of the right size, can be read.

Only what describes a file's contents is read, not the tensors: it is cheap, and what a disk or a
copy damaged as a whole is found before anything is loaded from it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import TrainerState

from swiftfp8.errors import RunFailed
from swiftfp8.train import checkpoint as store


def require_readable(checkpoint: Path) -> None:
    """Refuse a whole checkpoint with a file that can't be read.

    Raises:
        RunFailed: naming the file, and the newest older checkpoint that can be read.
    """
    damaged = find_damaged(checkpoint)
    if damaged is None:
        return
    older = next((path for path in store.older_than(checkpoint) if not find_damaged(path)), None)
    fix = (
        f"go on from an older checkpoint: resume_from_checkpoint={older}"
        if older
        else "put a copy of the file back, or start again without resume_from_checkpoint: there is "
        "no older whole checkpoint beside this one"
    )
    raise RunFailed(
        f"the checkpoint is damaged: {damaged} can't be read",
        where=str(checkpoint / damaged),
        fix=fix,
    )


def find_damaged(checkpoint: Path) -> str | None:
    """The name of the first file of a whole checkpoint that can't be read, if any."""
    for name in (store.MANIFEST, *store.read_manifest(checkpoint)["files"]):
        try:
            _read(checkpoint / name)
        except Exception:  # a damaged pickle raises whatever its bytes happen to say
            return name
    return None


def _read(path: Path) -> None:
    """Read what a file says of its contents; raises what its format's reader raises."""
    if path.name == store.MANIFEST:
        manifest = store.read_manifest(path.parent)
        _require(isinstance(manifest["step"], int))
        _require(all(isinstance(manifest[key], dict) for key in ("progress", "data")))
        _require(isinstance(manifest.get("fingerprint", {}), dict))
    elif path.name == "trainer_state.json":
        _require(isinstance(TrainerState.load_from_json(str(path)).global_step, int))
    elif path.suffix == ".safetensors":
        with safe_open(str(path), framework="pt"):
            pass
    elif path.suffix == ".pt":
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    elif path.suffix == ".pth":  # random states, which hold NumPy's own objects
        with zipfile.ZipFile(path):
            pass


def _require(sound: bool) -> None:
    if not sound:
        raise ValueError

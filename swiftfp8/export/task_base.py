"""The model that an adapter of another task than language modelling is merged into.

A base checkpoint is a language model, or an encoder without a head; the adapter was trained on the
task's class, which names its tensors otherwise and has a head of its own. So the base is written
once more as that class stores it, beside the export, and removed when the export is done.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.load import read_hf_config
from swiftfp8.models.quiet import quiet_transformers
from swiftfp8.models.task_model import auto_class, set_head
from swiftfp8.tasks import TASK_FILE, TASKS, Trained, read_task_file

_OWN = ("config.json", "generation_config.json")


@contextmanager
def task_base(
    model_dir: Path, adapter_dir: Path | None, export_dir: Path, *, trust_remote_code: bool = False
) -> Iterator[Path]:
    """`model_dir`, or where the adapter's task needs it another directory that lives meanwhile."""
    trained = read_task_file(adapter_dir) if adapter_dir else None
    if trained is None:
        yield model_dir
        return
    export_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".swiftfp8-base-", dir=export_dir.parent) as folder:
        base = Path(folder) / model_dir.resolve().name
        _write(model_dir, trained, base, trust_remote_code)
        yield base


def copy_task_file(target: Path, *sources: Path | None) -> None:
    """Copy what the weights are for, from the first directory that says it."""
    for source in sources:
        if source is not None and (source / TASK_FILE).is_file():
            shutil.copyfile(source / TASK_FILE, target / TASK_FILE)
            return


def _write(model_dir: Path, trained: Trained, base: Path, trust_remote_code: bool) -> None:
    task = TASKS[trained.task]
    config = read_hf_config(model_dir, trust_remote_code)
    if trained.head is not None:
        set_head(config, trained.head, trained.pad_token_id)
    try:
        with quiet_transformers():
            model = auto_class(task).from_pretrained(
                model_dir,
                config=config,
                dtype="auto",
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                ignore_mismatched_sizes=trained.head is not None,
            )
            model.save_pretrained(base)
    except (OSError, ValueError, RuntimeError) as error:
        raise SwiftFP8Error(
            f"the base can't be loaded for task={task.name}: {str(error).splitlines()[0]}",
            where=str(model_dir),
            fix="give the base model that the adapter was trained on",
        ) from error
    for file in model_dir.iterdir():
        weights = file.suffix == ".safetensors" or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in _OWN:
            shutil.copyfile(file, base / file.name)

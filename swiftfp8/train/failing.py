"""Training that breaks off: what is still saved, and what the user is told."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.train import checkpoint as store
from swiftfp8.train.keeping import KeepingTrainer
from swiftfp8.train.run_place import resume_command

_WORKER_LOST = re.compile(r"DataLoader worker .*(is killed by|exited unexpectedly)")


class RowsFailed(Exception):
    """A step's rows did not come, for `__cause__`; nothing of the step was done."""


def out_of_rows(
    error: BaseException, trainer: KeepingTrainer, began: int, *, saves: bool
) -> SwiftFP8Error:
    """What to raise where rows stop coming; the steps since `began` are saved first.

    Before the session's first step a fault in the data is the user's mistake, as before a run.

    Raises:
        RunFailed: the checkpoint could not be written.
    """
    session, step = trainer.session, trainer.state.global_step
    if saves and step > began and trainer.args.world_size == 1:
        newest = store.newest_checkpoint(session.run_dir)
        if newest is None or newest.name != f"checkpoint-{step}":
            session.display.note(f"no rows came after step {step}: saving a checkpoint")
            trainer._save_checkpoint(trainer.model)
    if not isinstance(error, SwiftFP8Error):
        return broken_off(error, step, session.run_dir)
    if step == began or not saves:
        return error
    fix = f"{error.fix}; {_way_back(session.run_dir)}"
    return RunFailed(
        f"training broke off after step {step}: {error.what}",
        where=error.where or "dataset",
        fix=fix if error.fix else _way_back(session.run_dir),
    )


def broken_off(error: BaseException, step: int, run_dir: Path) -> RunFailed:
    """A fault that nobody foresaw, with the way back; the traceback stays attached."""
    back = _way_back(run_dir)
    text = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        return RunFailed(
            f"the GPU ran out of memory at step {step + 1}",
            where=str(run_dir),
            fix="lower per_device_train_batch_size (raise gradient_accumulation_steps to keep the "
            f"step's size) or max_length, or set gradient_checkpointing=full; {back}",
        )
    if _WORKER_LOST.search(text):
        return RunFailed(
            f"training broke off at step {step + 1}: the process that prepares rows was killed, "
            f"most often because the machine had no memory left ({text})",
            where=str(run_dir),
            fix="give the job more memory, or lower data.shuffle_buffer (data.streaming) or "
            f"data.num_workers; {back}",
        )
    return RunFailed(
        f"training broke off at step {step + 1}: {type(error).__name__}: {text}",
        where=str(run_dir),
        fix=f"set SWIFTFP8_DEBUG=1 for the traceback; {back}",
    )


def _way_back(run_dir: Path) -> str:
    newest = store.newest_checkpoint(run_dir)
    if newest is None:
        return "no checkpoint was saved yet"
    return f"the newest checkpoint is {newest.name}; resume with: {resume_command(run_dir)}"

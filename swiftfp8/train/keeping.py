"""The trainer's checkpoints: what is written after a step, which are kept, what a resume takes."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch

from swiftfp8 import inject
from swiftfp8.train import checkpoint as store
from swiftfp8.train.average import WeightAverage, take_weights
from swiftfp8.train.batches import STREAM, data_shape
from swiftfp8.train.metrics import Progress
from swiftfp8.train.session import Session
from swiftfp8.train.stepping import SteppingTrainer
from swiftfp8.train.weights import load_weights, save_weights, write_task_file


class KeepingTrainer(SteppingTrainer):
    """A trainer that writes checkpoints whole, with the average of its weights where there is one.

    `last_eval` is the step and the loss of the last evaluation, `_place` the last row of a stream.
    """

    def __init__(self, session: Session, **kwargs: Any) -> None:
        self.last_eval: tuple[int, float] | None = None
        self._place: dict[str, Any] | None = None
        super().__init__(session, **kwargs)
        decay = session.config.train.ema_decay
        self.average = WeightAverage(self.model.parameters(), decay) if decay else None
        if self.average is not None:
            self.add_callback(self.average)

    def _before_saving(self) -> None:
        """Bring the run's progress up to date."""

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write `checkpoint-<step>` whole, move `best` and `last`, and delete what is too old."""
        session, step = self.session, self.state.global_step
        progress = session.meter.progress
        with session.meter.paused():
            session.meter.elapsed()
            self._before_saving()
            improved = self._improves(progress)
            if improved:
                assert self.last_eval is not None
                progress.best_step, progress.best_loss = self.last_eval
            manifest = {
                "fingerprint": session.fingerprint,
                "job": session.job,
                "progress": progress.to_dict(),
                "data": self._data_state(),
            }
            path = store.write_checkpoint(session.run_dir, step, self._fill, manifest)
            if improved:
                store.link(session.run_dir, "best", path)
            store.rotate(session.run_dir, session.config.train.save_total_limit)

    def _data_state(self) -> dict[str, Any]:
        if not self.session.config.data.streaming:
            return data_shape(len(self.train_dataset), self.session.config)
        return {**data_shape(None, self.session.config), STREAM: self._place}

    def _improves(self, progress: Progress) -> bool:
        if self.last_eval is None or self.last_eval[0] != self.state.global_step:
            return False
        value = self.last_eval[1]
        return math.isfinite(value) and (progress.best_loss is None or value < progress.best_loss)

    def _fill(self, folder: Path) -> None:
        plan, tokenizer = self.session.plan, self.session.tokenizer
        with self._averaged():
            save_weights(self.model, tokenizer, folder, inject.plain_state_dict, plan)
        if self.average is not None:
            self.average.save(folder)
        padding = getattr(self.session.tokenizer, "pad_token_id", None)
        write_task_file(folder, self.session.plan, padding)
        scaling = inject.scaling_state(self.model)
        if scaling:
            torch.save(scaling, folder / "scaling.pt")
        self._save_optimizer_and_scheduler(str(folder))
        self._save_scaler(str(folder))
        self._save_rng_state(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        plan = self.session.plan
        load_weights(
            self.model, folder, inject.plain_state_dict, inject.load_plain_state_dict, plan
        )
        note = self.session.display.note
        if self.average is not None and not self.average.load(folder):
            note("the checkpoint has no average of weights: it begins here (train.ema_decay)")
        elif self.average is None and take_weights(self.model.parameters(), folder):
            note("the checkpoint's average of weights is not kept up (train.ema_decay=0)")
        recipe = self.session.plan.recipe
        if (folder / "scaling.pt").exists():
            if recipe is None or recipe.recipe != "fp8_delayed":
                self.session.display.note("delayed scaling's history is not used any more")
                return
            device = self.args.device
            tensors = torch.load(folder / "scaling.pt", map_location=device, weights_only=True)
            inject.load_scaling_state(self.model, tensors)

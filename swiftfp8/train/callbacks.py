"""When a run logs, evaluates, saves, switches FP8 on and stops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from swiftfp8.config.schema import TrainConfig
from swiftfp8.train.metrics import Progress


class AtFirstStep(TrainerCallback):
    """Does something once: when a checkpoint is loaded and the rows of the first step are there."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._done = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Act before the session's first step."""
        if not self._done:
            self._done = True
            self._act()


class Cadence(TrainerCallback):
    """Sets transformers' control flags after each optimizer step.

    A periodic checkpoint is evaluated first (where evaluation is on), so that `best` can be
    chosen among all of them. A stop request saves at once, without an evaluation. Without `saves`
    nothing is ever saved.
    """

    def __init__(
        self,
        settings: TrainConfig,
        *,
        evaluates: bool,
        begin: Callable[[], None],
        stop_requested: Callable[[], bool],
        saves: bool = True,
    ) -> None:
        self._settings = settings
        self._saves = saves
        self._begin = begin
        self._evaluates = evaluates
        self._stop_requested = stop_requested

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start the clock: all is set up."""
        self._begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Decide what follows this step."""
        step, last = state.global_step, state.global_step >= state.max_steps
        stop = self._stop_requested()
        due_save = _due(step, self._settings.save_steps)
        due_eval = _due(step, self._settings.eval_steps)
        if self._settings.eval_steps and due_save:
            due_eval = True
        control.should_log = step == 1 or last or _due(step, self._settings.logging_steps)
        control.should_save = self._saves and (last or stop or due_save)
        control.should_evaluate = self._evaluates and not stop and (last or due_eval)
        control.should_training_stop = last or stop
        return control


class EarlyStop(TrainerCallback):
    """Ends the run after `patience` evaluations without a lower loss; 0 never does.

    What it counts is the run's `progress`, which a checkpoint carries: a resumed run counts on.
    """

    def __init__(
        self,
        patience: int,
        *,
        progress: Callable[[], Progress],
        note: Callable[[str], None],
        saves: bool = True,
    ) -> None:
        self._patience = patience
        self._progress = progress
        self._note = note
        self._saves = saves

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float],
        **_: Any,
    ) -> TrainerControl:
        """Look back; a loss that is no number counts as no lower one."""
        progress, loss = self._progress(), metrics["eval_loss"]
        lowest = math.inf if progress.lowest_eval is None else progress.lowest_eval
        if loss < lowest:
            progress.lowest_eval, progress.evaluations_since = loss, 0
        else:
            progress.evaluations_since += 1
        since = progress.evaluations_since
        if 0 < self._patience <= since and state.global_step < state.max_steps:
            self._note(
                f"stopped early at step {state.global_step}: no lower evaluation loss than "
                f"{lowest:.4f} in {since} evaluations (train.early_stopping_patience)"
            )
            control.should_training_stop = True
            control.should_save = self._saves
        return control


class PrecisionWatch(TrainerCallback):
    """Switches FP8 on after `start_step` optimizer steps, and measures what then really runs.

    `measure` is called after the first step under FP8 and at the end of training.
    """

    def __init__(
        self, start_step: int, switch: Callable[[bool], None], measure: Callable[[int], None]
    ) -> None:
        self._start_step = start_step
        self._switch = switch
        self._measure = measure
        self._measured = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Off before `start_step`, on where a run resumes beyond it."""
        self._switch(state.global_step >= self._start_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """On from `start_step`; one step later, look."""
        step = state.global_step
        if step > self._start_step and not self._measured:
            self._measured = True
            self._measure(step)
        if self._start_step and step == self._start_step:
            self._switch(True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Look again: evaluation and all later steps are counted too."""
        if self._measured:
            self._measure(state.global_step)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

"""transformers' training loop with our precision, guard and log.

transformers.Trainer keeps the loop, accumulation, data position and random states. Ours is what
surrounds a forward pass, what is counted, and everything that is written; stepping.py has the
optimizer, keeping.py the checkpoints.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.utils.data import Sampler, SequentialSampler

from swiftfp8 import inject
from swiftfp8.data.stream import take_place
from swiftfp8.errors import RunFailed
from swiftfp8.train import checkpoint as store
from swiftfp8.train.batches import (
    EpochSampler,
    WorkerStart,
    count_targets,
    count_tokens,
    or_one,
    stream_loader,
)
from swiftfp8.train.failing import RowsFailed
from swiftfp8.train.guard import find_fault, total_norm
from swiftfp8.train.keeping import KeepingTrainer
from swiftfp8.train.objectives import Sums, finish, merge
from swiftfp8.train.run_place import resume_command
from swiftfp8.train.session import Session
from swiftfp8.train.signals import WorkerDeaths

_AUTOCAST = {"bf16": torch.bfloat16}


class FP8Trainer(KeepingTrainer):
    """transformers.Trainer under a precision plan."""

    def __init__(self, session: Session, **kwargs: Any) -> None:
        self.worker_deaths = WorkerDeaths()
        self._micro_batches: list[Any] = []
        self._step_loss: torch.Tensor | None = None
        self._step_tokens: torch.Tensor | int = 0
        self._window: Sums = {}  # of the objective, since the counters were last written down
        super().__init__(session, **kwargs)
        if session.objective is not None:
            self.model_accepts_loss_kwargs = True  # our loss is divided by the step's rows already
        self.remove_callback(transformers.PrinterCallback)
        self.remove_callback(transformers.trainer_callback.DefaultFlowCallback)

    # The forward pass

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Autocast and the precision backend's context, for training and evaluation alike.

        BF16's autocast is ours: accelerate's also converts the logits to FP32 on the way out,
        which for a large vocabulary costs gigabytes that nothing reads.
        """
        stack = super().compute_loss_context_manager()
        plan = self.session.plan
        if plan.compute_dtype in _AUTOCAST:
            stack.enter_context(torch.autocast(plan.device, dtype=_AUTOCAST[plan.compute_dtype]))
        stack.enter_context(inject.forward_context(plan))
        return stack

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of a micro-batch; the step's loss is added up on the device."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = loss.float() if self._step_loss is None else self._step_loss + loss
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The model's own loss, or the objective's over the step's number of rows."""
        objective = self.session.objective
        if objective is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outcome = objective.run(model, inputs)
        if model.training:
            self._window = merge(self._window, outcome.sums)
        # Gradients are averaged over processes, each of which has a part of the rows.
        return outcome.loss / num_items_in_batch * self.accelerator.num_processes

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and by how many trained tokens their loss is divided.

        The first label of a row is never predicted, so it does not count; a step whose rows were
        all cut before their answer divides by one, not by zero.

        Raises:
            RowsFailed: they can't be read; the model is as the step before left it.
        """
        arriving = map(self._arrived, epoch_iterator)
        trained = self._place
        try:
            with self.worker_deaths.heard(), self.session.meter.waiting():
                batches, _ = super().get_batch_samples(arriving, num_batches, device)
        except Exception as error:
            self._place = trained  # micro-batches that did arrive are not trained
            raise RowsFailed from error
        self._micro_batches = batches
        self._step_loss = None
        self._step_tokens = sum(count_tokens(batch) for batch in batches)
        if not batches:
            return batches, None
        count = sum((self._count(batch) for batch in batches), torch.zeros((), dtype=torch.long))
        count = count.to(device)
        if self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return batches, or_one(count)

    def _arrived(self, batch: Any) -> Any:
        """A batch without its place in a stream, which is noted; a stream's error is raised."""
        self._place = take_place(batch) or self._place
        return batch

    def _count(self, batch: Any) -> torch.Tensor:
        """What a batch's loss is the mean over: predicted tokens, or an objective's rows."""
        objective = self.session.objective
        if objective is None:
            return count_targets(batch)
        return torch.tensor(objective.rows(batch), device=batch["input_ids"].device)

    # Between the backward pass and the optimizer step

    def _clip_grad_norm(self, model: Any) -> float:
        """Check loss and gradient norm, then clip; returns the norm before clipping."""
        self.accelerator.unscale_gradients()
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in parameters])
        assert self._step_loss is not None
        tokens = torch.as_tensor(self._step_tokens, device=norm.device)
        # One read from the device for all that the host wants to know of this step.
        read = torch.stack([self._step_loss.double(), norm.double(), tokens.double()]).tolist()
        loss, norm_value = read[0], read[1]
        self._check_finite(loss, norm_value)
        if math.isfinite(self.args.max_grad_norm):
            torch.nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)
        skipped = self.args.fp16 and not math.isfinite(norm_value)
        self.session.meter.step_done(loss, int(read[2]), skipped=skipped)
        self.session.display.step(self.state.global_step + 1)
        return norm_value

    def _check_finite(self, loss: float, norm: float) -> None:
        session = self.session
        bad_norm = not math.isfinite(norm) and not self.args.fp16  # the scaler's business
        if (math.isfinite(loss) and not bad_norm) or session.config.guard.on_nonfinite != "stop":
            return
        what = "gradient norm" if math.isfinite(loss) else "loss"
        fault = find_fault(self.model, self._micro_batches, self._forward)
        good = store.newest_checkpoint(session.run_dir)
        kept = f"the last good checkpoint is {good.name}" if good else "no checkpoint was saved yet"
        back = f"; go back with: {resume_command(session.run_dir, good)}" if good else ""
        step = self.state.global_step + 1
        linears = {layer.name for layer in session.plan.layers}
        # Where several linears run as one function, what holds them is named.
        excluded = fault.layer if fault.layer in linears else f"{fault.layer}.*"
        raise RunFailed(
            f"the {what} is not finite at step {step}: {fault.detail}; {kept}",
            where=fault.layer or "no layer could be named",
            fix="lower learning_rate, raise warmup_ratio, or keep the layer out of FP8 with "
            f"precision.exclude=[{excluded if fault.layer else 'NAME'}]{back}",
        )

    def _forward(self, inputs: Any) -> Any:
        objective = self.session.objective
        with self.compute_loss_context_manager():
            batch = self._prepare_inputs(inputs)
            return self.model(**batch) if objective is None else objective.run(self.model, batch)

    # Data order

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if not self.session.config.data.shuffle:
            return SequentialSampler(dataset)
        return EpochSampler(len(dataset), self.session.config.seed)

    def get_train_dataloader(self) -> Any:
        """The training rows; loader processes leave Ctrl-C to the trainer."""
        if self.session.config.data.streaming:
            return stream_loader(
                self.train_dataset,
                self.data_collator,
                batch_size=self.args.train_batch_size,
                pin_memory=self.args.dataloader_pin_memory,
            )
        loader = super().get_train_dataloader()
        loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
        return loader

    # Evaluation and logging

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss over the evaluation rows' trained tokens, weighed as in training, or an
        objective's over the rows.

        It leaves training undisturbed.

        A stop request ends it early, without a result.
        """
        session = self.session
        model = self.model_wrapped
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        sums: Sums = {}
        devices = [torch.cuda.current_device()] if self.args.device.type == "cuda" else []
        model.eval()
        with (
            session.meter.paused(),
            torch.random.fork_rng(devices),
            _scaling_kept(self.model),
            self._averaged(),
            torch.no_grad(),
        ):
            for inputs in self.get_eval_dataloader(eval_dataset):
                if session.stop.requested:
                    self.control.should_save = self.control.should_training_stop = True
                    return {}
                batch = self._prepare_inputs(inputs)
                batch.pop("num_tokens", None)
                count = self._count(batch)
                with self.compute_loss_context_manager():
                    if session.objective is None:
                        items = or_one(count)
                        loss = self.compute_loss(model, batch, num_items_in_batch=items)
                        # It is multiplied by the number of processes, for averaged gradients.
                        loss = loss.double() * count / self.accelerator.num_processes
                    else:
                        outcome = session.objective.run(model, batch)
                        loss, sums = outcome.loss.double(), merge(sums, outcome.sums)
                total += torch.stack([loss, count.double()])
            loss_sum, tokens = self.accelerator.reduce(total, "sum").tolist()
        value = loss_sum / (tokens or 1.0)
        self.last_eval = (self.state.global_step, value)
        metrics = {f"{metric_key_prefix}_loss": value}
        for name, measured in self._measured(sums).items():
            metrics[f"{metric_key_prefix}_{name}"] = measured
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _measured(self, sums: Sums) -> dict[str, float]:
        """An objective's metrics of what all processes counted."""
        if self.session.objective is None:
            return {}
        return finish(self.session.objective, self.accelerator.reduce(sums, "sum"))

    def _before_saving(self) -> None:
        self._write_window_down()

    def _write_window_down(self) -> Sums:
        """What the objective counted since the last line, with what a checkpoint brought."""
        progress = self.session.meter.progress
        before = {name: torch.tensor(value) for name, value in progress.window_sums.items()}
        here = {name: value.cpu() for name, value in self._window.items()}
        total = merge(here, before)
        progress.window_sums = {name: value.tolist() for name, value in total.items()}
        self._window = {}
        return total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a line to `logging.jsonl`, show it, and pass it on to `report_to`."""
        session = self.session
        line: dict[str, Any] = dict(logs)
        if "loss" in logs:
            measured = session.meter.close_window()
            line = {
                "loss": measured.pop("loss"),
                "learning_rate": logs["learning_rate"],
                "grad_norm": logs.get("grad_norm"),
                **self._measured(self._write_window_down()),
                **measured,
            }
            session.meter.progress.window_sums = {}
        if "loss" in logs or "eval_loss" in logs:
            line = {
                "step": self.state.global_step,
                "epoch": self._epoch(),
                **line,
                "time": round(session.meter.elapsed(), 3),
            }
            session.log.append(line)
            session.display.logged(line)
        passed = {k: v for k, v in line.items() if v is not None and k not in ("step", "epoch")}
        super().log(passed)

    def _epoch(self) -> float:
        """Passes over the data; of a stream, whose length is not known, the whole ones."""
        return float(self._place["turn"]) if self._place else round(self.state.epoch or 0.0, 6)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: the meter knows the plan's own FLOPs."""
        return 0


@contextlib.contextmanager
def _scaling_kept(model: Any) -> Iterator[None]:
    """Keep evaluation out of delayed scaling: Transformer Engine records it like training."""
    scaling = inject.scaling_state(model)
    try:
        yield
    finally:
        if scaling:
            inject.load_scaling_state(model, scaling)

"""transformers' training loop with our precision, guard, log and checkpoints.

transformers.Trainer keeps the loop, optimizer, schedule, accumulation, data position and random
states. Ours is what surrounds a forward pass, what is counted, and everything that is written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from swiftfp8 import inject
from swiftfp8.config.schema import Config
from swiftfp8.data.stream import take_place
from swiftfp8.errors import RunFailed
from swiftfp8.plan import Plan
from swiftfp8.train import checkpoint as store
from swiftfp8.train.average import WeightAverage, take_weights
from swiftfp8.train.guard import find_fault
from swiftfp8.train.losses import targets
from swiftfp8.train.masters import MasterAdamW, drop_masters
from swiftfp8.train.metrics import Meter, Progress, RunLog
from swiftfp8.train.objectives import Objective, Sums, finish, merge
from swiftfp8.train.optimizers import ExactAdafactor, Lion, MuonAdamW, parameter_groups
from swiftfp8.train.progress import Display
from swiftfp8.train.run_place import resume_command
from swiftfp8.train.signals import StopRequest, ignore_interrupts
from swiftfp8.train.weights import load_weights, save_weights, write_task_file

STREAM = "stream"  # in a checkpoint's manifest: the place of the last row
_STREAM_BATCHES = 8  # that wait for the training loop
_AUTOCAST = {"bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Session:
    """What the trainer works with besides transformers' own arguments.

    `objective` is None for language modelling, whose loss is the model's own.
    """

    plan: Plan
    config: Config
    run_dir: Path
    tokenizer: Any
    fingerprint: dict[str, Any]
    meter: Meter
    log: RunLog
    display: Display
    stop: StopRequest
    objective: Objective | None = None
    job: dict[str, Any] = field(default_factory=dict)  # see train/changes.py


class FP8Trainer(transformers.Trainer):
    """transformers.Trainer under a precision plan."""

    def __init__(self, session: Session, **kwargs: Any) -> None:
        self.session = session
        self._micro_batches: list[Any] = []
        self._step_loss: torch.Tensor | None = None
        self._step_tokens: torch.Tensor | int = 0
        self._place: dict[str, Any] | None = None  # in a stream, of the last batch
        self._window: Sums = {}  # of the objective, since the counters were last written down
        self.last_eval: tuple[int, float] | None = None  # step, loss
        super().__init__(**kwargs)
        decay = session.config.train.ema_decay
        self.average = WeightAverage(self.model.parameters(), decay) if decay else None
        if self.average is not None:
            self.add_callback(self.average)
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
        """
        arriving = map(self._arrived, epoch_iterator)
        with self.session.meter.waiting():
            batches, _ = super().get_batch_samples(arriving, num_batches, device)
        self._micro_batches = batches
        self._step_loss = None
        self._step_tokens = sum(count_tokens(batch) for batch in batches)
        if not batches:
            return batches, None
        count = sum((self._count(batch) for batch in batches), torch.zeros((), dtype=torch.long))
        count = count.to(device)
        if self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return batches, _or_one(count)

    def _arrived(self, batch: Any) -> Any:
        """A batch without its place in a stream, which is noted; a stream's error is raised."""
        self._place = take_place(batch) or self._place
        return batch

    def _count(self, batch: Any) -> torch.Tensor:
        """What a batch's loss is the mean over: predicted tokens, or an objective's rows."""
        objective = self.session.objective
        if objective is None:
            return _count_targets(batch)
        return torch.tensor(objective.rows(batch), device=batch["input_ids"].device)

    # Between the backward pass and the optimizer step

    def _clip_grad_norm(self, model: Any) -> float:
        """Check loss and gradient norm, then clip; returns the norm before clipping."""
        self.accelerator.unscale_gradients()
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = _total_norm([p.grad for p in parameters])
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
        raise RunFailed(
            f"the {what} is not finite at step {step}: {fault.detail}; {kept}",
            where=fault.layer or "no layer could be named",
            fix="lower learning_rate, raise warmup_ratio, or keep the layer out of FP8 with "
            f"precision.exclude=[{fault.layer or 'NAME'}]{back}",
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
            return DataLoader(
                self.train_dataset,
                batch_size=self.args.train_batch_size,
                collate_fn=self.data_collator,
                num_workers=1,  # which tokenizes
                prefetch_factor=_STREAM_BATCHES,
                pin_memory=self.args.dataloader_pin_memory,
                worker_init_fn=_WorkerStart(None),
                generator=torch.Generator(),  # its seed is not taken from what dropout goes by
            )
        loader = super().get_train_dataloader()
        loader.worker_init_fn = _WorkerStart(loader.worker_init_fn)
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
                        items = _or_one(count)
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

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.average is None else self.average.applied()

    def _measured(self, sums: Sums) -> dict[str, float]:
        """An objective's metrics of what all processes counted."""
        if self.session.objective is None:
            return {}
        return finish(self.session.objective, self.accelerator.reduce(sums, "sum"))

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

    # The optimizer

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """transformers' choice and groups, but on FP32 masters where the plan says so."""
        plan, optim = self.session.plan, self.session.config.optim
        plus = plan.lora.plus_ratio if plan.lora else 1.0
        if self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        if plan.master_weights:
            kind, options = MasterAdamW, {**options, "state_dtype": plan.state_dtype}
        elif optim.name == "lion":
            kind, options = Lion, {"betas": options["betas"], "lr": options["lr"]}
        elif optim.name == "adafactor":
            kind = ExactAdafactor
        elif optim.name == "muon":
            kind = MuonAdamW
            options = {key: options[key] for key in ("lr", "betas", "eps")}
        if plus != 1.0 or optim.name == "muon":
            options["params"] = parameter_groups(
                self.model,
                set(self.get_decay_parameter_names(self.model)),
                weight_decay=self.args.weight_decay,
                rate=self.args.learning_rate,
                plus=plus,
                muon=optim.name == "muon",
            )
        self.optimizer_cls_and_kwargs = (kind, options)
        return super().create_optimizer(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        asked = [dict(group, params=None) for group in optimizer.param_groups]
        rates = list(scheduler.base_lrs)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            _apply_options(optimizer, scheduler, asked, rates)
        if isinstance(optimizer, MasterAdamW):
            if optimizer.lacked_masters:
                self.session.display.note(
                    "WARNING: the checkpoint has no FP32 masters: they begin at its BF16 weights"
                )
        elif drop_masters(optimizer):
            self.session.display.note(
                "WARNING: the checkpoint's FP32 masters are dropped: weights are not trained on "
                "masters here (optim.master_weights=false, or another precision)"
            )

    def _load_scaler(self, checkpoint: str | None) -> None:
        """FP16's loss scale, where this session has a scaler too."""
        if self.session.plan.loss_scaler:
            super()._load_scaler(checkpoint)

    # Checkpoints

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Write `checkpoint-<step>` whole, move `best` and `last`, and delete what is too old."""
        session, step = self.session, self.state.global_step
        progress = session.meter.progress
        with session.meter.paused():
            session.meter.elapsed()
            self._write_window_down()
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


class EpochSampler(Sampler[int]):
    """A permutation that depends on seed and epoch only, not on what else drew random numbers."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; accelerate's data loader calls this."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        yield from torch.randperm(self._rows, generator=generator).tolist()

    def __len__(self) -> int:
        return self._rows


def data_shape(rows: int | None, config: Config) -> dict[str, Any]:
    """What must be equal for a resumed run to see the same rows in the same order.

    `rows` is None of a stream, whose place is kept, however many rows a step takes.
    """
    if rows is None:
        return {
            "streaming": True,
            "dataset": list(config.dataset),
            "shuffle_buffer": config.data.shuffle_buffer,
            "eval_rows": config.data.eval_rows,
            "seed": config.seed,
            "shuffle": config.data.shuffle,
            "packing": config.packing,
        }
    return {
        "streaming": False,
        "rows": rows,
        "batch_size": config.per_device_train_batch_size,
        "accumulation": config.gradient_accumulation_steps,
        "seed": config.seed,
        "shuffle": config.data.shuffle,
        "packing": config.packing,
    }


def _apply_options(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    asked: list[dict[str, Any]],
    rates: list[float],
) -> None:
    """Take the options of this session: what was loaded holds those of the checkpoint's.

    `asked` are the parameter groups and `rates` the peak learning rates before loading.
    """
    for group, options in zip(optimizer.param_groups, asked, strict=True):
        group.update({k: v for k, v in options.items() if k not in ("params", "lr")})
    scheduler.base_lrs = rates
    shapes = scheduler.lr_lambdas
    for group, rate, shape in zip(optimizer.param_groups, rates, shapes, strict=True):
        group["lr"] = rate * shape(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


@contextlib.contextmanager
def _scaling_kept(model: Any) -> Iterator[None]:
    """Keep evaluation out of delayed scaling: Transformer Engine records it like training."""
    scaling = inject.scaling_state(model)
    try:
        yield
    finally:
        if scaling:
            inject.load_scaling_state(model, scaling)


@dataclass(frozen=True)
class _WorkerStart:
    """A data loader process's first act. (A class, so that it can be pickled.)"""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        ignore_interrupts()
        if self.then is not None:
            self.then(worker)


def _total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, in FP32 whatever their own precision."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def count_tokens(batch: Any) -> torch.Tensor | int:
    """Tokens that are not padding. What a packed batch says of itself is taken out of it."""
    if "num_tokens" in batch:
        return batch.pop("num_tokens")
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else (mask != 0).sum()


def _count_targets(batch: Any) -> torch.Tensor:
    """Tokens that are predicted, or their weights: labels not masked, but for each row's first."""
    weights = batch.get("loss_weights")
    return targets(batch["labels"][..., 1:], None if weights is None else weights[..., 1:])


def _or_one(count: torch.Tensor) -> torch.Tensor:
    """A divisor: where nothing is counted, nothing is divided."""
    return torch.where(count == 0, torch.ones_like(count), count)

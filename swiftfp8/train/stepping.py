"""The trainer's optimizer and schedule, and what they take over from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from swiftfp8.train.masters import MasterAdamW, drop_masters
from swiftfp8.train.optimizers import ExactAdafactor, Lion, MuonAdamW, parameter_groups
from swiftfp8.train.session import Session


class SteppingTrainer(transformers.Trainer):
    """transformers.Trainer with the plan's optimizer, under this session's options."""

    def __init__(self, session: Session, **kwargs: Any) -> None:
        self.session = session
        super().__init__(**kwargs)

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
            apply_options(optimizer, scheduler, asked, rates)
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


def apply_options(
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

"""Optimizers that transformers has not, and the groups of parameters that they step.

Lion (Chen et al., 2023): u = sign(b1 m + (1 - b1) g), w -= lr (u + wd w), m = b2 m + (1 - b2) g.
Muon steps a matrix by the orthogonal part of its momentum, scaled to AdamW's usual size
(`match_rms_adamw`), so that one learning rate serves it and the AdamW beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

Groups = list[dict[str, Any]]


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum; one state of the weight's size."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                average = state["exp_avg"]
                direction = torch.lerp(weight.grad, average, beta1).sign_()
                weight.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
                average.lerp_(weight.grad, 1 - beta2)
        return loss


class ExactAdafactor(Adafactor):
    """transformers' Adafactor, whose FP32 states beside BF16 weights come back as they were.

    torch's `load_state_dict` would round them to the weights' dtype.
    """

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, and keep each state's own dtype."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for weight, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, torch.Tensor):
                        self.state[weight][name] = value.to(weight.device, copy=True)


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon for groups with `muon=True`, torch's AdamW for the others.

    Both work on this optimizer's groups and state, so that it saves and resumes as one.
    """

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "muon": False, "weight_decay": 0.0})
        for group in self.param_groups:
            if group["muon"]:
                part: torch.optim.Optimizer = torch.optim.Muon(
                    group["params"], adjust_lr_fn="match_rms_adamw"
                )
            else:
                part = torch.optim.AdamW(group["params"], betas=betas, eps=eps)
            for key, value in part.param_groups[0].items():
                group.setdefault(key, value)
        # Their own groups are replaced in every step: loading a state makes new ones here.
        stub = [nn.Parameter(torch.zeros(1, 1))]
        self._parts = {True: torch.optim.Muon(stub), False: torch.optim.AdamW(stub)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for muon, part in self._parts.items():
            part.param_groups = [g for g in self.param_groups if g["muon"] == muon]
            part.state = self.state
            part.step()
        return loss


def parameter_groups(
    model: nn.Module,
    decayed: set[str],
    *,
    weight_decay: float,
    rate: float,
    plus: float,
    muon: bool,
) -> Groups:
    """Trained parameters by what their step has in common; empty groups are left out.

    `decayed` are names with weight decay; LoRA's B has `plus` times the `rate`; with `muon`,
    matrices inside of layers are told apart from the rest.
    """
    groups: dict[tuple[bool, bool, bool], dict[str, Any]] = {}
    for name, parameter in _trained(model):
        decays = name in decayed
        faster = plus != 1.0 and ".lora_B." in name
        matrix = muon and parameter.ndim == 2 and ".layers." in name
        options = {
            "params": [],
            "weight_decay": weight_decay if decays else 0.0,
            "lr": rate * (plus if faster else 1.0),
        }
        if muon:
            options["muon"] = matrix
        groups.setdefault((decays, faster, matrix), options)["params"].append(parameter)
    return list(groups.values())


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((n, p) for n, p in model.named_parameters() if p.requires_grad)

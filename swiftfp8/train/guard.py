"""Stops a run whose numbers are no longer finite, before they reach the weights, and says where.

The check is one read from the device a step, on the loss and the gradient norm together, between
the backward pass and the optimizer step. The layer is looked for only after a fault: the step's
forward passes are run again with hooks that test every module's output; if all are finite, the
fault arose in the backward pass, and the gradients are searched by name. A gradient that is not
finite spoils those of all layers before it, so the one whose module ran last lies nearest to the
source.

With FP16's loss scaler a gradient that is not finite is normal (the scaler then skips the step and
lowers its scale), so there only the loss counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Where a value that is not finite was first seen."""

    layer: str | None
    detail: str


def find_fault(model: nn.Module, batches: Sequence[Any], forward: Callable[[Any], Any]) -> Fault:
    """Name the layer in which values stop being finite.

    Args:
        model: the model, its gradients as the faulty backward pass left them.
        batches: the step's micro-batches.
        forward: runs the model on one of them, as in training.
    """
    fault, order = _search_forward(model, batches, forward)
    if fault is not None:
        return fault
    names = list(nonfinite_gradients(model))
    if names:
        nearest = max(names, key=lambda name: _position(name, order))
        more = f" (and of {len(names) - 1} others)" if len(names) > 1 else ""
        layer = plan_name(nearest.rpartition(".")[0] or nearest)
        return Fault(layer=layer, detail=f"the gradient of {nearest}{more} is not finite")
    return Fault(layer=None, detail="a second forward pass was finite: no layer could be named")


def nonfinite_gradients(model: nn.Module) -> Iterable[str]:
    """Names of parameters whose gradient is not finite, in the model's order."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _is_finite(parameter.grad):
            yield name


def plan_name(name: str) -> str:
    """A module's name as the plan and `precision.exclude` have it, without PEFT's wrapping."""
    name = name.removeprefix("base_model.model.").partition(".lora_")[0]
    return name.removesuffix(".base_layer")


def _search_forward(
    model: nn.Module, batches: Sequence[Any], forward: Callable[[Any], Any]
) -> tuple[Fault | None, dict[str, int]]:
    """The first fault, and each module's place in the order in which modules returned."""
    found: list[Fault] = []
    order: dict[str, int] = {}
    # Inner modules return before the module that holds them: the first hit is the innermost.
    hooks = [
        module.register_forward_hook(_hook(name, found, order))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.no_grad():
            for batch in batches:
                forward(batch)
                if found:
                    break
    finally:
        for hook in hooks:
            hook.remove()
    return (found[0] if found else None), order


def _position(parameter: str, order: dict[str, int]) -> int:
    """When the parameter's module ran; an adapter may be run by the module around it."""
    name = parameter
    while name := name.rpartition(".")[0]:
        if name in order:
            return order[name]
    return -1


def _hook(name: str, found: list[Fault], order: dict[str, int]) -> Callable[..., None]:
    def check(module: nn.Module, inputs: Any, output: Any) -> None:
        order.setdefault(name, len(order))
        if found or all(_is_finite(tensor) for tensor in _tensors(output)):
            return
        found.append(Fault(layer=plan_name(name), detail=_describe(module, inputs)))

    return check


def _describe(module: nn.Module, inputs: Any) -> str:
    bad = [name for name, parameter in module.named_parameters() if not _is_finite(parameter)]
    if bad:
        return f"its parameter {bad[0]} holds values that are not finite"
    if all(_is_finite(tensor) for tensor in _tensors(inputs)):
        return "its output is not finite though its input is"
    return "its input is not finite already"


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(tensor.detach()).all())


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, in FP32 whatever their own precision."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))

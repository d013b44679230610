"""Puts the plan into the model: FP8 linears, the adapter, what is trained, what is recomputed.

It decides nothing. Layers are replaced one by one, each moved to the device just before and its
high-precision weight freed just after, so that the device never holds more than the finished
model and one layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swiftfp8.adapters.lora import add_adapter
from swiftfp8.adapters.pissa import Principal, begin_with, take_principal
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.plan import FP8_RECIPES, LayerPlan, Plan
from swiftfp8.precision._backend import PrecisionLinear, find_backend
from swiftfp8.precision._selective import selective_checkpoint
from swiftfp8.precision.high import compute_in_float32

log = logging.getLogger(__name__)
_PEFT_PREFIX = "base_model.model."
_RECOMPUTE = {"none": "none", "selective": "cheap", "full": "full"}


@dataclass(frozen=True, kw_only=True)
class CoverageReport:
    """What really ran in FP8, weighted by matmul FLOPs.

    `measured` is the share of all planned matmuls, `planned` the share that the plan promised,
    `kept` the part of the promise that was kept. `missing` maps a linear that was planned for
    FP8, and did not always run in it, to what happened.
    """

    measured: float
    planned: float
    kept: float
    missing: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes that a model's tensors hold now. `fp8` is the converted layers' weights."""

    fp8: int
    fp8_parameters: int
    trained: int
    other: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.fp8 + self.trained + self.other


def inject_precision(model: PreTrainedModel, plan: Plan, device: str | torch.device) -> nn.Module:
    """Replace the planned linears, move everything to `device`, add LoRA; returns the model.

    With tuner=lora all but the adapter is frozen, with tuner=freeze all but the plan's modules,
    with tuner=full everything is trained. A fresh
    adapter is drawn from the CPU's random state, which the caller seeds.
    """
    backend = find_backend(plan.backend)
    reason = backend.available()
    if reason is not None:
        raise SwiftFP8Error(f"precision backend '{backend.NAME}' can't run here: {reason}")
    model.requires_grad_(plan.tuner == "full")
    for name in plan.trained:
        _require_grad(model, name)
    principal: dict[str, Principal] = {}
    for layer in plan.layers:
        if layer.lora and plan.lora is not None and plan.lora.init == "pissa":
            linear: Any = model.get_submodule(layer.name)
            principal[layer.name] = take_principal(linear.to(device), layer.name, plan.lora)
        if layer.precision in FP8_RECIPES:
            _replace(model, layer, plan, backend.convert, device)
    for name in plan.head_modules:
        compute_in_float32(model.get_submodule(name))
    _move_rest(model, device)
    injected = model if plan.lora is None else add_adapter(model, plan.lora)
    begin_with(injected, principal)
    if plan.gradient_checkpointing != "none":
        # After PEFT, which would else make the embeddings' output require gradients: recomputation
        # without re-entry needs none, and the first layer is spared its dgrad.
        enable_gradient_checkpointing(injected, plan)
    if plan.fusion.layers:
        _fuse(injected, plan, backend)
    if plan.fusion.compiled:
        backend.compile_layers(injected, swiglu=plan.fusion.swiglu)
    return injected


def precision_linears(model: nn.Module) -> Iterator[tuple[str, PrecisionLinear]]:
    """The converted linears, each under the name that the plan knows it by."""
    for name, module in model.named_modules():
        if isinstance(module, PrecisionLinear):
            yield name.removeprefix(_PEFT_PREFIX).removesuffix(".base_layer"), module


def measure_coverage(model: nn.Module, plan: Plan) -> CoverageReport:
    """The share of matmul FLOPs that ran in FP8 since the counters were last reset."""
    modules = dict(precision_linears(model))
    total = promised = ran = 0.0
    missing: dict[str, str] = {}
    for layer in plan.layers:
        flops = float(layer.in_features * layer.out_features * layer.count)
        total += flops
        if layer.precision not in FP8_RECIPES:
            continue
        promised += flops
        share, fault = _share_in_fp8(modules.get(layer.name))
        ran += flops * share
        if fault is not None:
            missing[layer.name] = fault
    return CoverageReport(
        measured=ran / total if total else 0.0,
        planned=promised / total if total else 0.0,
        kept=ran / promised if promised else 1.0,
        missing=missing,
    )


def reset_coverage(model: nn.Module) -> None:
    """Count from zero again, after FP8 was switched on, say."""
    for _, module in precision_linears(model):
        module.ran_fp8 = module.ran_high = 0


def set_fp8_enabled(model: nn.Module, on: bool) -> None:
    """Switch FP8 on or off in every converted linear."""
    for _, module in precision_linears(model):
        module.enabled = on


def fp8_enabled(model: nn.Module) -> bool:
    """Whether converted linears run in FP8 now."""
    return any(module.enabled for _, module in precision_linears(model))


def forward_context(plan: Plan) -> AbstractContextManager[Any]:
    """What a forward pass has to run in: one for each micro-batch, backward may lie outside."""
    return find_backend(plan.backend).context(plan.recipe)


def enable_gradient_checkpointing(model: nn.Module, plan: Plan) -> None:
    """Recompute each decoder layer in the backward pass, in full or all but its matmuls.

    An FP8 layer is recomputed under the recipe that it ran with.
    """
    if plan.gradient_checkpointing == "selective" and plan.backend != "torch":
        rank = plan.lora.rank if plan.lora else 0
        ranks = [layer.lora_rank or rank for layer in plan.layers if layer.lora]
        function = selective_checkpoint(max(ranks, default=0))
    else:
        function = find_backend(plan.backend).checkpoint(plan.recipe)
    switched = 0
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module._gradient_checkpointing_func = function
            module.gradient_checkpointing = True
            switched += 1
        if isinstance(module, PreTrainedModel):
            module.config.use_cache = False
    if not switched:
        raise SwiftFP8Error(
            f"{type(model).__name__} has no gradient checkpointing",
            fix="set gradient_checkpointing=none",
        )


def plain_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """A fully trained model's tensors under Hugging Face's names; a tied tensor appears once."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in _state(model).items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen or tensor.numel() == 0:
            tensors[name] = tensor
        seen.add(key)
    return tensors


def load_plain_state_dict(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the model; names and shapes must be those of `plain_state_dict`."""
    own = plain_state_dict(model)
    aliases = _state(model)
    for name in sorted(set(own) ^ set(tensors)):
        if name in own:
            raise SwiftFP8Error(f"the checkpoint lacks {name}")
        if name not in aliases:
            raise SwiftFP8Error(f"the checkpoint holds {name}, which the model does not have")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                shapes = f"{tuple(tensors[name].shape)}, the model's {tuple(tensor.shape)}"
                raise SwiftFP8Error(f"the checkpoint's {name} is {shapes}")
            tensor.copy_(tensors[name])


def scaling_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Delayed scaling's memory as plain tensors, for an exact resume; empty for other recipes."""
    return {
        f"{name}:{key}": tensor
        for name, module in precision_linears(model)
        for key, tensor in module.scaling_state().items()
    }


def load_scaling_state(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore what `scaling_state` returned."""
    for name, module in precision_linears(model):
        own = {key: value for key, value in tensors.items() if key.rpartition(":")[0] == name}
        module.load_scaling_state({key.rpartition(":")[2]: value for key, value in own.items()})


def count_bytes(model: nn.Module) -> ModelBytes:
    """Bytes that weights and buffers hold now, cached transposes included."""
    fp8 = fp8_parameters = 0
    counted: set[int] = set()
    for _, module in precision_linears(model):
        fp8 += module.weight_bytes()
        fp8_parameters += module.in_features * module.out_features
        counted |= {id(module._parameters.get("weight"))}
        counted |= {id(buffer) for buffer in module.buffers(recurse=False)}
    trained = other = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) in counted:
            continue
        if tensor.requires_grad:
            trained += tensor.nbytes
        else:
            other += tensor.nbytes
    return ModelBytes(fp8=fp8, fp8_parameters=fp8_parameters, trained=trained, other=other)


def _require_grad(model: nn.Module, name: str) -> None:
    """Train a module, or a parameter that a plan takes for one (all experts' weights)."""
    owner, _, last = name.rpartition(".")
    part = getattr(model.get_submodule(owner), last)
    part.requires_grad_(True)


def _replace(
    model: nn.Module,
    layer: LayerPlan,
    plan: Plan,
    convert: Callable[..., nn.Module],
    device: str | torch.device,
) -> None:
    parent_name, _, child = layer.name.rpartition(".")
    parent = model.get_submodule(parent_name)
    linear = getattr(parent, child)
    assert type(linear) is nn.Linear, f"{layer.name} is a {type(linear).__name__}"
    assert linear.weight.shape == (layer.out_features, layer.in_features), layer.name
    converted = convert(linear.to(device), layer, plan.recipe)
    converted.train(linear.training)
    setattr(parent, child, converted)


def _move_rest(model: nn.Module, device: str | torch.device) -> None:
    """Move all that is no converted linear. (Those sit there already, in FP8.)"""
    for module in model.modules():
        if not isinstance(module, PrecisionLinear):
            module._apply(lambda tensor: tensor.to(device), recurse=False)


def _fuse(model: nn.Module, plan: Plan, backend: Any) -> None:
    """Run decoder layers as one function, which recomputes by itself what the plan says.

    Says which layers run linear by linear, once for each reason.
    """
    recompute = _RECOMPUTE[plan.gradient_checkpointing]
    layers: dict[str, str | None] = backend.finish(
        model, recompute=recompute, graphs=plan.fusion.graphs
    )
    for name in (name for name, reason in layers.items() if reason is None):
        layer: Any = model.get_submodule(name)
        layer.gradient_checkpointing = plan.gradient_checkpointing == "full"
    for reason in sorted({reason for reason in layers.values() if reason is not None}):
        names = [name for name, why in layers.items() if why == reason]
        log.warning("%d decoder layers run unfused, %s the first: %s", len(names), names[0], reason)


def _share_in_fp8(module: PrecisionLinear | None) -> tuple[float, str | None]:
    if module is None:
        return 0.0, "was not converted"
    runs = module.ran_fp8 + module.ran_high
    if runs == 0:
        return 0.0, "never ran"
    if module.ran_high:
        return module.ran_fp8 / runs, f"{module.ran_high} of {runs} passes in high precision"
    return 1.0, None


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if not name.endswith("_extra_state")
    }

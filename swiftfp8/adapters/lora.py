"""LoRA on any precision's linear, kept by PEFT, so that plain PEFT reads what is saved.

    y = x Wᵀ + s · dropout(x) Aᵀ Bᵀ        s = alpha / r, or alpha / √r with rsLoRA

With DoRA each output o is scaled by m_o / ‖W + s B A‖_o, the trained length of its row over the
row's own (which no gradient flows through); the bias is not. W is what the matmul sees: an FP8
weight is dequantized for it, one layer at a time.

PEFT owns names, files and life cycle; ours is the layer it puts around a linear: A and B stay
float32, the optimizer's masters, and are cast to the compute dtype in the forward pass. (PEFT's
own layer would cast x up to float32 and rely on autocast to bring it down again.)
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.variants import DoraLinearVariant
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.quiet import quiet_peft
from swiftfp8.plan import LoraPlan
from swiftfp8.precision._backend import PrecisionLinear, add_lora


class _Dora(DoraLinearVariant):
    """PEFT's DoRA, but that it begins with the rows of the weight that the matmul sees."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        layer = DoraLinearLayer(fan_in_fan_out=False)
        layer.weight = nn.Parameter(_seen_weight(module.get_base_layer()).norm(dim=1))
        module.lora_magnitude_vector[adapter_name] = layer


class LoraPrecisionLinear(PeftLinear):
    """PEFT's LoRA layer over a PrecisionLinear or an nn.Linear."""

    def resolve_lora_variant(self, **kwargs: Any) -> Any:
        """PEFT's choice, with our DoRA for its own."""
        variant = super().resolve_lora_variant(**kwargs)
        return _Dora() if isinstance(variant, DoraLinearVariant) else variant

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _move_adapter_to_device_of_base_layer(
        self, adapter_name: str, device: torch.device | None = None
    ) -> None:
        """To the base's device, but not to its dtype, which may be FP8."""
        device = self.get_base_layer().weight.device if device is None else device
        for part in (self.lora_A, self.lora_B, self.lora_dropout):
            if adapter_name in part:
                part[adapter_name].to(device=device, dtype=torch.float32)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum at the head of this file; PEFT's own forward where adapters are off or merged."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or kwargs or not active:
            return super().forward(x, *args, **kwargs)
        base = self.get_base_layer()
        first, *others = active
        if isinstance(base, PrecisionLinear):
            y = base.forward_lora(x, *self._parts(first))
        else:
            y = add_lora(base(x), x, *self._parts(first))
        if first in self.lora_magnitude_vector:
            assert not others, "DoRA is the only adapter"
            return self._scale_rows(y, first)
        for name in others:
            y = add_lora(y, x, *self._parts(name))
        return y

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Only into a high-precision base: an FP8 weight would swallow most of the update."""
        if isinstance(self.get_base_layer(), PrecisionLinear):
            raise SwiftFP8Error(
                "an adapter can't be merged into a weight held in FP8",
                fix="export or merge the run: both start from the original weights",
            )
        super().merge(safe_merge, adapter_names)

    def _scale_rows(self, y: torch.Tensor, name: str) -> torch.Tensor:
        """DoRA: each output, without its bias, times m / ‖W + s B A‖."""
        a, b, scaling, _ = self._parts(name)
        base = self.get_base_layer()
        with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
            norm = torch.addmm(_seen_weight(base), b, a, alpha=scaling).norm(dim=1)
            norm = norm.where(norm > 0, 1.0)  # a row of zeros (padding) has no direction
        factor = (self.lora_magnitude_vector[name].weight / norm).to(y.dtype)
        if base.bias is None:
            return y * factor
        bias = base.bias.to(y.dtype)
        return (y - bias) * factor + bias

    def _parts(self, name: str) -> tuple[torch.Tensor, torch.Tensor, float, nn.Module]:
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return a, b, self.scaling[name], self.lora_dropout[name]


def _seen_weight(base: nn.Module) -> torch.Tensor:
    """The weight [out, in] in float32, as the matmul sees it."""
    if isinstance(base, PrecisionLinear):
        return base.dequantize().detach()
    return base.weight.detach().float()


def add_adapter(model: PreTrainedModel, plan: LoraPlan) -> PeftModel:
    """Freeze `model` and put a fresh LoRA adapter on the plan's targets, and on nothing else."""
    modules = [name for name, _ in model.named_modules()]
    config = LoraConfig(
        r=plan.rank,
        lora_alpha=int(plan.alpha) if plan.alpha == int(plan.alpha) else plan.alpha,
        lora_dropout=plan.dropout,
        use_rslora=plan.use_rslora,
        use_dora=plan.use_dora,
        target_modules=compact_targets(plan.targets, modules),
        rank_pattern=dict(plan.rank_pattern),
        alpha_pattern=dict(plan.alpha_pattern),
        init_lora_weights="gaussian" if plan.init == "gaussian" else True,
        bias="none",
        task_type=plan.task_type,
        modules_to_save=compact_targets(plan.modules_to_save, modules) or None,
    )
    layers = {PrecisionLinear: LoraPrecisionLinear, nn.Linear: LoraPrecisionLinear}
    config._register_custom_module(layers)
    with quiet_peft():
        adapted = get_peft_model(model, config)
    found = {
        name.removeprefix("base_model.model.")
        for name, module in adapted.named_modules()
        if isinstance(module, LoraPrecisionLinear)
    }
    assert found == set(plan.targets), f"LoRA missed its targets: {found ^ set(plan.targets)}"
    for module in adapted.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save.float()  # the optimizer's masters, as A and B are
    return adapted


def compact_targets(targets: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Last name parts, where they select the targets and nothing else; full names elsewhere.

    PEFT matches a module whose name equals an entry or ends in "." and the entry.
    """
    wanted = set(targets)
    names = wanted | set(modules)
    parts: list[str] = []
    for last in sorted({name.rpartition(".")[2] for name in wanted}):
        selected = {name for name in names if name.rpartition(".")[2] == last}
        parts += [last] if selected <= wanted else sorted(selected & wanted)
    return parts


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Read the weights of a saved adapter into the adapter that `model` has."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise SwiftFP8Error("no adapter here", where=str(file))
    _check_same_shape(model.peft_config["default"], folder / "adapter_config.json")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise SwiftFP8Error(f"the adapter can't be read: {error}", where=str(file)) from error
    expected = _adapter_shapes(model)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        name = sorted(set(expected.items()) ^ set(found.items()))[0][0]
        raise SwiftFP8Error(
            f"the adapter is another model's: {name} is {found.get(name, 'missing')}, "
            f"the model has {expected.get(name, 'no such tensor')}",
            where=str(file),
        )
    set_peft_model_state_dict(model, tensors)


def _adapter_shapes(model: PeftModel) -> dict[str, tuple[int, ...]]:
    return {
        name.replace(".default.", "."): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if ".lora_A.default." in name or ".lora_B.default." in name
    }


def _check_same_shape(config: LoraConfig, file: Path) -> None:
    """A different alpha or rsLoRA leaves all shapes alike, and the model silently another one."""
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SwiftFP8Error(
            f"the adapter's settings can't be read: {error}", where=str(file)
        ) from error
    for key in ("r", "lora_alpha", "use_rslora"):
        if saved.get(key) != getattr(config, key):
            raise SwiftFP8Error(
                f"the adapter was trained with {key}={saved.get(key)}, not {getattr(config, key)}",
                where=str(file),
            )

"""PiSSA: the adapter begins as the weight's principal part, the frozen base is what is left of it.

    W = U Σ Vᵀ      s B₀ A₀ = U_r Σ_r V_rᵀ      base = W - s B₀ A₀      (Meng et al. 2024)

Training moves the directions that matter most, and an FP8 base has only the rest to round. The base
on disk stays W, so what is saved is the change against it, an ordinary adapter of twice the rank:

    s (B A - B₀ A₀) = s [B, -B₀] [A; A₀]        s = alpha / r, so alpha is doubled too (rsLoRA: √2)

A session finds A₀ and B₀ of its base anew, by subspace iteration (Halko et al. 2011, algorithm 4.4)
from one fixed start: Q spans more directions than r, and each round takes it closer to the leading
ones. The same weight gives the same parts; what they miss of U_r stays in the base.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from swiftfp8.tuning import pattern_value

if TYPE_CHECKING:
    from swiftfp8.plan import LoraPlan

StateDict = dict[str, torch.Tensor]
Principal = tuple[torch.Tensor, torch.Tensor]  # A₀ [r, in] and B₀ [out, r], float32
# Directions beside r, and rounds: each takes what is kept of the others down by the square of the
# ratio of their singular values to the kept ones'.
_SPARE, _ROUNDS = 16, 8
_FILE = "adapter_model.safetensors"


def take_principal(linear: nn.Linear, name: str, lora: LoraPlan) -> Principal:
    """Take the principal part out of the weight of `linear`, full name `name`: A₀ and B₀.

    The linear gets a weight of its own, so one that shared it (a tied embedding) keeps all of it.
    """
    rank = int(pattern_value(dict(lora.rank_pattern), name, lora.rank))
    alpha = float(pattern_value(dict(lora.alpha_pattern), name, lora.alpha))
    scaling = alpha / (math.sqrt(rank) if lora.use_rslora else rank)
    weight_OI = linear.weight.detach().float()
    right_IR = _leading(weight_OI, rank)
    left_OR = weight_OI @ right_IR  # columns as long as Σ says
    size = left_OR.norm(dim=0).clamp(min=torch.finfo(torch.float32).tiny)
    share = (size / scaling).sqrt()
    a, b = (right_IR * share).t().contiguous(), left_OR / size * share
    rest = weight_OI - scaling * (b @ a)
    linear.weight = nn.Parameter(rest.to(linear.weight.dtype), linear.weight.requires_grad)
    return a, b


def _leading(weight_OI: torch.Tensor, rank: int) -> torch.Tensor:
    """The right singular vectors [I, rank] of the largest singular values, as columns."""
    outs, ins = weight_OI.shape
    width = min(rank + _SPARE, outs, ins)
    start = torch.randn(ins, width, generator=torch.Generator().manual_seed(0))
    q = torch.linalg.qr(start.to(weight_OI.device)).Q
    for _ in range(_ROUNDS):
        q = torch.linalg.qr(weight_OI.t() @ (weight_OI @ q)).Q
    projected = weight_OI @ q
    within = torch.linalg.eigh(projected.t() @ projected).eigenvectors  # ascending
    return q @ within[:, -rank:]


def begin_with(model: PeftModel, principal: dict[str, Principal]) -> None:
    """Let the adapter begin as `principal`, by full module name, which each layer remembers."""
    for name, (a, b) in principal.items():
        layer: Any = model.get_base_model().get_submodule(name)
        with torch.no_grad():
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b)
        layer.register_buffer("principal_A", a, persistent=False)
        layer.register_buffer("principal_B", b, persistent=False)


def save_change(model: PeftModel, folder: Path) -> None:
    """Write the change against the base on disk, which PEFT reads as an adapter of rank 2r."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved = {}
    for name, tensor in tensors.items():
        path, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind == "lora_A":
            tensor = torch.cat([tensor, model.get_submodule(path).principal_A])
        elif kind == "lora_B":
            tensor = torch.cat([tensor, -model.get_submodule(path).principal_B], dim=1)
        saved[name] = tensor.detach().contiguous().cpu()
    save_file(saved, folder / _FILE, metadata={"format": "pt"})
    _doubled(model.peft_config["default"]).save_pretrained(str(folder))


def without_principal(tensors: StateDict) -> StateDict:
    """A and B of what `save_change` wrote."""
    kept = {}
    for name, tensor in tensors.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind == "lora_A":
            tensor = tensor[: len(tensor) // 2]
        elif kind == "lora_B":
            tensor = tensor[:, : tensor.shape[1] // 2]
        kept[name] = tensor.contiguous()
    return kept


def _doubled(config: LoraConfig) -> LoraConfig:
    """The adapter's settings at twice the rank and the same scaling."""
    saved = copy.deepcopy(config)
    factor = math.sqrt(2) if config.use_rslora else 2
    saved.r = 2 * config.r
    saved.lora_alpha = factor * config.lora_alpha
    saved.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    saved.alpha_pattern = {name: factor * alpha for name, alpha in config.alpha_pattern.items()}
    saved.init_lora_weights = True
    saved.inference_mode = True
    return saved

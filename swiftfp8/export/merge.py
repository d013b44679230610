"""LoRA merged into the original weights, tensor by tensor.

    W' = W + scaling * (B @ A)        scaling = alpha / r, or alpha / sqrt(r) with rsLoRA

and with DoRA each row of W' is then brought to the length that was trained for it.

W [N, K] as the base checkpoint stores it, A [r, K], B [N, r]. The sum is float32 and is rounded
only once, by whoever writes it. The product runs in float64: its rounding is far below float32's,
so that the order in which a device sums can't show, and a GPU merges to the same bytes as a CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import TensorSpec, read_header, read_json
from swiftfp8.export.fp8_reader import DequantizingReader, TensorReader
from swiftfp8.tuning import pattern_value

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.weight)?")
_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, kw_only=True)
class LoraUpdate:
    """One module's update: a [r, K], b [N, r] as stored, and the factor on their product."""

    a_RK: Tensor
    b_NR: Tensor
    scaling: float
    magnitude_N: Tensor | None = None  # DoRA's

    def merged(self, stored: Tensor, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the merged weight, from the base's, on its device."""
        weight = stored.to(torch.float32) + self.rows(start, stop, stored.device)
        if self.magnitude_N is None:
            return weight
        length: Tensor = weight.to(torch.float64).norm(dim=1, keepdim=True)
        wanted = self.magnitude_N[start:stop, None].to(stored.device, torch.float64)
        # A row of zeros has no direction, and stays one.
        scaled: Tensor = weight.to(torch.float64) * (wanted / length.where(length > 0, 1.0))
        return scaled.to(torch.float32)

    def rows(self, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
        """Rows [start, stop) of scaling * (B @ A), float32 [stop - start, K]."""
        b = self.b_NR[start:stop].to(device, torch.float64)
        return (b @ self.a_RK.to(device, torch.float64)).mul_(self.scaling).to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A PEFT LoRA adapter: updates by weight name, and tensors that replace whole weights."""

    directory: Path
    base: str | None
    updates: Mapping[str, LoraUpdate]
    replaced: Mapping[str, Tensor] = field(default_factory=dict)


class MergedCheckpoint:
    """A base checkpoint with an adapter merged on the fly: what is read is already merged.

    Raises:
        SwiftFP8Error: an adapter tensor that fits no weight of the base, by name or by shape.
    """

    def __init__(self, base: TensorReader, adapter: Adapter | None = None) -> None:
        self.base = base
        self.adapter = adapter
        self.specs: Mapping[str, TensorSpec] = base.specs
        self._updates = dict(adapter.updates) if adapter else {}
        self._replaced = dict(adapter.replaced) if adapter else {}
        if adapter:
            _check_fit(adapter, base.specs)

    def changed(self, name: str) -> bool:
        """True where the adapter changes this tensor."""
        return name in self._updates or name in self._replaced

    def update(
        self, name: str, start: int, stop: int, device: torch.device | str = "cpu"
    ) -> Tensor | None:
        """Rows of LoRA's update where the base stores FP8, whose rounding may swallow it."""
        fp8 = isinstance(self.base, DequantizingReader) and name in self.base.quantized
        if not fp8 or name not in self._updates:
            return None
        if self._updates[name].magnitude_N is None:
            return self._updates[name].rows(start, stop, device)
        stored = self.base.rows(name, start, stop, device)
        return self.rows(name, start, stop, device) - stored.to(torch.float32)

    def rows(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Rows [start, stop): float32 where LoRA changes them, as stored where nothing does."""
        if name in self._replaced:
            replacement = self._replaced[name]
            part = replacement[start:stop] if replacement.dim() else replacement
            return part.to(device, torch.float32)
        stored = self.base.rows(name, start, stop, device)
        if name not in self._updates:
            return stored
        end = self.specs[name].rows if stop is None else stop
        return self._updates[name].merged(stored, start, end)


def load_adapter(directory: Path) -> Adapter:
    """Read a PEFT LoRA adapter directory, refusing what a plain merge would get wrong."""
    config = read_json(directory / ADAPTER_CONFIG)
    _refuse_unsupported(config, directory)
    weights = directory / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise SwiftFP8Error(
            f"the adapter has no {ADAPTER_WEIGHTS}",
            where=str(directory),
            fix="save it with save_pretrained(..., safe_serialization=True)",
        )
    tensors = _read_all(weights)
    sides: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    magnitudes: dict[str, Tensor] = {}
    odd: list[str] = []
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise SwiftFP8Error(
                f"the adapter's {key} is {str(tensor.dtype).removeprefix('torch.')}",
                where=str(weights),
                fix="an adapter's weights are BF16, FP16, FP32 or FP64: save it in one of them",
            )
        name = key.removeprefix(_PEFT_PREFIX)
        match = _LORA_KEY.fullmatch(name)
        if length := _MAGNITUDE.fullmatch(name):
            magnitudes[length["module"]] = tensor
        elif match:
            sides.setdefault(match["module"], {})[match["side"]] = tensor
        elif "lora_" not in name and _is_module_to_save(name, config):
            replaced[name] = tensor
        else:
            odd.append(key)
    if config.get("use_dora"):
        odd += [f"{module}.lora_magnitude_vector" for module in sides.keys() ^ magnitudes.keys()]
    else:
        odd += [f"{module}.lora_magnitude_vector" for module in magnitudes]
    odd += [f"{module}.lora_*" for module, pair in sides.items() if len(pair) != 2]
    if odd or not (sides or replaced):
        raise _unmergeable(odd, directory)
    updates = {
        f"{module}.weight": _update(module, pair, config, directory, magnitudes.get(module))
        for module, pair in sides.items()
    }
    base = config.get("base_model_name_or_path")
    return Adapter(directory=directory, base=base, updates=updates, replaced=replaced)


def _update(
    module: str,
    pair: Mapping[str, Tensor],
    config: Mapping[str, Any],
    directory: Path,
    magnitude: Tensor | None,
) -> LoraUpdate:
    a, b = pair["A"], pair["B"]
    rank = _number("r", "rank_pattern", module, config, directory)
    alpha = _number("lora_alpha", "alpha_pattern", module, config, directory)
    where = f"{directory / ADAPTER_WEIGHTS}: {module}"
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise SwiftFP8Error(
            f"adapter shapes A {tuple(a.shape)} and B {tuple(b.shape)} do not fit r={rank:g}",
            where=where,
        )
    if magnitude is not None and magnitude.numel() != b.shape[0]:
        raise SwiftFP8Error(
            f"DoRA's {magnitude.numel()} row lengths do not fit {b.shape[0]} rows", where=where
        )
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise SwiftFP8Error(
            "the adapter holds NaN or infinity", where=where, fix="take an earlier checkpoint"
        )
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    lengths = None if magnitude is None else magnitude.reshape(-1)
    return LoraUpdate(a_RK=a, b_NR=b, scaling=scaling, magnitude_N=lengths)


def _number(
    key: str, patterns: str, module: str, config: Mapping[str, Any], directory: Path
) -> float:
    """A module's rank or alpha; SwiftFP8Error where the file gives no number."""
    try:
        value = pattern_value(config.get(patterns) or {}, module, config.get(key))
    except (re.error, AttributeError) as error:
        raise SwiftFP8Error(
            f"{patterns} is no mapping of module patterns to numbers: {config[patterns]}",
            where=f"{directory / ADAPTER_CONFIG}: {patterns}",
            fix="take the file that the adapter was saved with",
        ) from error
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value)) or (key == "r" and value <= 0):
        raise SwiftFP8Error(
            f"{key} of {module} is {value}",
            where=f"{directory / ADAPTER_CONFIG}: {key} or {patterns}",
            fix="take the file that the adapter was saved with",
        )
    return float(value)


def _refuse_unsupported(config: Mapping[str, Any], directory: Path) -> None:
    init = config.get("init_lora_weights")
    refusals = {
        "is not LoRA": config.get("peft_type") != "LORA",
        "uses fan_in_fan_out (transposed weights)": config.get("fan_in_fan_out"),
        "trains biases (bias != none)": config.get("bias", "none") != "none",
        "has biases of its own (lora_bias)": config.get("lora_bias"),
        "replicates layers": config.get("layer_replication"),
        "targets bare parameters (target_parameters)": config.get("target_parameters"),
        f"was initialised by changing the base weights ({init})": isinstance(init, str)
        and init.lower().startswith(_BASE_CHANGING_INITS),
    }
    for what, refused in refusals.items():
        if refused:
            raise SwiftFP8Error(
                f"this adapter {what}, which swiftfp8 does not merge",
                where=str(directory / ADAPTER_CONFIG),
                fix="merge it with PEFT's merge_and_unload and export the merged directory",
            )


def _is_module_to_save(name: str, config: Mapping[str, Any]) -> bool:
    modules = config.get("modules_to_save") or []
    path = name.rpartition(".")[0]
    return any(part in modules for part in name.split(".")) or path in modules


def _check_fit(adapter: Adapter, specs: Mapping[str, TensorSpec]) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        name: (update.b_NR.shape[0], update.a_RK.shape[1])
        for name, update in adapter.updates.items()
    }
    shapes |= {name: tuple(tensor.shape) for name, tensor in adapter.replaced.items()}
    missing = [name for name in shapes if name not in specs]
    if missing:
        raise _unmergeable(missing, adapter.directory)
    for name, shape in shapes.items():
        if specs[name].shape != shape:
            raise SwiftFP8Error(
                f"the adapter is for {name} of shape {shape}, the base has {specs[name].shape}",
                where=str(adapter.directory),
                fix="give the base model that the adapter was trained on",
            )


def _unmergeable(names: Iterable[str], directory: Path) -> SwiftFP8Error:
    listed = sorted(names)
    shown = ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
    return SwiftFP8Error(
        f"adapter tensors that match no weight of the base: {shown or 'the adapter is empty'}",
        where=str(directory),
        fix="give the base model that the adapter was trained on, and a plain LoRA adapter",
    )


def _read_all(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    read_header(file)  # a damaged file is the user's error, with a name
    return load_file(str(file))

"""Which weights of a checkpoint are matmuls, and which of them may become FP8.

Names come from the checkpoint, kinds from the model class built on the meta device: only a plain
nn.Linear is a candidate (some routers subclass it), and of those not the head, not a router, not
a vision tower. Engines fuse q/k/v and gate/up into one matmul, so such a group is quantized whole
or not at all; where one member's shape does not fit the blocks, all stay in BF16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import FLOATS, TensorSpec, read_json
from swiftfp8.models.task_model import auto_class_of, head_modules
from swiftfp8.registry import suggest
from swiftfp8.selection import matches

FUSED_GROUPS = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"query", "key", "value"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"w1", "w3"}),
    frozenset({"q_a_proj", "kv_a_proj_with_mqa"}),
)
_KEPT = {
    "head": "output head",
    "score": "score head: few outputs, all of which count",
    "pooler": "pooler: engines keep it as it is",
}
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_OTHER_TOWERS = re.compile(r"vision|visual|audio|image|multi_modal|mm_proj")
_EXPERT = re.compile(r"(?P<experts>.+)\.\d+\.[^.]+")


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """What a model class says of its checkpoint. `linears` maps module names to a kind.

    Kinds: "linear", "head", "router", "score" (a classifier's head), "pooler". `experts` are
    modules that hold several experts, whose weights a checkpoint stores one by one. `keep_fp32` are
    patterns of parameters that the class wants in float32. `tied` maps tensors that repeat another
    one to that other one. Where the class names a module in another way than checkpoints do, both
    names are there, and `aliases` maps the checkpoint's to the class's. `speaks`: it is a language
    model.
    """

    config: Mapping[str, Any]
    linears: Mapping[str, str]
    experts: tuple[str, ...]
    keep_fp32: tuple[str, ...]
    tied: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    speaks: bool = True


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one linear's weight becomes, and why. `name` is the module's full name."""

    name: str
    shape: tuple[int, ...]
    quantize: bool
    reason: str


def inspect_model(directory: Path, *, trust_remote_code: bool = False) -> ModelLayers:
    """Build the model of `directory` without weights and list its linears.

    A base in FP8 is taken for the BF16 model that it stands for.

    Raises:
        SwiftFP8Error: no config.json, an architecture that transformers does not know, or a base
            that is quantized in a way that can't be undone here.
    """
    raw = read_json(directory / "config.json")
    section = raw.get("quantization_config")
    if section is not None and not isinstance(section, Mapping):
        raise SwiftFP8Error(
            "quantization_config is no JSON object",
            where=str(directory / "config.json"),
            fix="copy config.json again from where the model came from",
        )
    if section is not None and not is_fp8(section):
        raise SwiftFP8Error(
            f"this model is quantized already ({section.get('quant_method', '?')})",
            where=str(directory / "config.json"),
            fix="give the BF16 model that it was made from",
        )
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    return _layers_of(meta_model(directory, trust_remote_code)[1], plain)


def is_fp8(section: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` means e4m3 weights with scales beside them."""
    method = section.get("quant_method")
    if method == "compressed-tensors":
        groups = section.get("config_groups")
        weights = [
            group.get("weights") if isinstance(group, Mapping) else None
            for group in (groups.values() if isinstance(groups, Mapping) else ())
        ]
        return bool(weights) and all(
            isinstance(w, Mapping) and (w.get("type"), w.get("num_bits")) == ("float", 8)
            for w in weights
        )
    return method == "fp8" or (
        method == "modelopt" and str(section.get("quant_algo", "")).upper() == "FP8"
    )


def inspect_export(directory: Path, *, trust_remote_code: bool = False) -> ModelLayers:
    """The same for an exported, quantized directory."""
    raw = read_json(directory / "config.json")
    return _layers_of(meta_model(directory, trust_remote_code)[1], raw)


def meta_model(directory: Path, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """(config, model on the meta device) of a model directory, by transformers' classes."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        model_class = auto_class_of(config.architectures)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = model_class.from_config(config, trust_remote_code=trust_remote_code)
    except (
        # What odd values in config.json raise, deep in a model's class: no heads, no such dtype.
        *(ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError),
        *(KeyError, OSError, ImportError, StrictDataclassError),
    ) as error:
        raise SwiftFP8Error(
            f"transformers can't build this model: {_first_line(error)}",
            where=str(directory),
            fix="a language model, a classifier or an encoder is needed; set "
            "trust_remote_code=true if it has own code",
        ) from error
    return config, model


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def decide(
    layers: ModelLayers,
    specs: Mapping[str, TensorSpec],
    *,
    multiple: tuple[int, int],
    exclude: Sequence[str] = (),
    keep: Mapping[str, str] | None = None,
) -> tuple[Decision, ...]:
    """Decide for every linear of the checkpoint. `multiple` is what (N, K) must be divisible by.

    `exclude` are the user's patterns, `keep` maps patterns to a model family's reasons.
    """
    candidates = {
        name: specs[f"{name}.weight"]
        for name in linear_names(layers, specs)
        if f"{name}.weight" not in layers.tied
    }
    _check_patterns(exclude, candidates)
    reasons: dict[str, str | None] = {
        name: _why_not(layers, name, spec, multiple, exclude, keep or {})
        for name, spec in candidates.items()
    }
    for members in _groups(candidates):
        blocked = next((name for name in members if reasons[name]), None)
        for name in members:
            if blocked and not reasons[name]:
                reasons[name] = f"fused with {blocked.rpartition('.')[2]}: {reasons[blocked]}"
    decisions = [
        Decision(
            name=name,
            shape=spec.shape,
            quantize=reasons[name] is None,
            reason=reasons[name] or "linear",
        )
        for name, spec in candidates.items()
    ]
    return (*decisions, *_stacked_experts(layers, specs))


def fused_siblings(name: str) -> list[str]:
    """Names of the linears that engines fuse with `name`, itself included; [] for none."""
    parent, _, last = name.rpartition(".")
    group = next((group for group in FUSED_GROUPS if last in group), None)
    return sorted(f"{parent}.{member}" for member in group) if group else []


def _groups(names: Iterable[str]) -> list[list[str]]:
    known = set(names)
    grouped = {tuple(fused_siblings(name)) for name in known} - {()}
    return [[name for name in group if name in known] for group in sorted(grouped)]


def is_language(name: str) -> bool:
    """Whether a module is part of the language model, and not of a vision or audio tower."""
    return not _OTHER_TOWERS.search(name)


def linear_names(layers: ModelLayers, specs: Mapping[str, TensorSpec]) -> list[str]:
    """Modules whose 2D float weight is in the checkpoint and multiplies activations."""
    names = []
    for key, spec in specs.items():
        name = key.removesuffix(".weight")
        if name == key or len(spec.shape) != 2 or spec.dtype not in FLOATS | {"F8_E4M3"}:
            continue
        expert = _EXPERT.fullmatch(name)
        if name in layers.linears or (expert and expert["experts"] in layers.experts):
            names.append(name)
    return names


def _why_not(
    layers: ModelLayers,
    name: str,
    spec: TensorSpec,
    multiple: tuple[int, int],
    exclude: Sequence[str],
    keep: Mapping[str, str],
) -> str | None:
    """The reason why a linear stays in BF16, None where it is quantized."""
    kind = layers.linears.get(name, "linear")
    if kind in _KEPT:
        return _KEPT[kind]
    if kind == "router" or name.rpartition(".")[2] in _ROUTERS:
        return "router"
    if _OTHER_TOWERS.search(name):
        return "not part of the language model"
    for pattern in exclude:
        if matches(name, pattern):
            return f"export.exclude: {pattern}"
    for pattern, reason in keep.items():
        if matches(name, pattern):
            return reason
    for axis, length, divisor in zip(("out", "in"), spec.shape, multiple, strict=True):
        if length % divisor:
            return f"{axis}_features {length} is no multiple of {divisor}"
    return None


def _stacked_experts(layers: ModelLayers, specs: Mapping[str, TensorSpec]) -> list[Decision]:
    """Modules whose experts the checkpoint stores as 3D tensors, which no engine takes in FP8."""
    found = []
    for module in layers.experts:
        stacked = [s for s in specs.values() if s.name.startswith(f"{module}.")]
        shape = next((s.shape for s in stacked if len(s.shape) == 3), None)
        if shape:
            reason = "experts stored as one 3D tensor"
            found.append(Decision(name=module, shape=shape, quantize=False, reason=reason))
    return found


def _check_patterns(exclude: Sequence[str], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in exclude:
        if not any(matches(name, pattern) for name in known):
            close = suggest(pattern, {name.rpartition(".")[2] for name in known})
            raise SwiftFP8Error(
                f"'{pattern}' matches no linear of this model",
                where="export.exclude",
                fix=f"did you mean {close}?" if close else "give a name such as down_proj",
            )


def _layers_of(model: Any, raw: Mapping[str, Any]) -> ModelLayers:
    from torch import nn

    head = model.get_output_embeddings()
    model_class = auto_class_of(raw.get("architectures")).__name__
    scores = head_modules(model) if "Classification" in model_class else ()
    speaks = model_class == "AutoModelForCausalLM"
    linears: dict[str, str] = {}
    experts = []
    for name, module in model.named_modules():
        if module is head and head is not None:
            linears[name] = "head"
        elif isinstance(module, nn.Linear) and name.split(".")[0] in scores:
            linears[name] = "score"
        elif isinstance(module, nn.Linear) and not speaks and "pooler" in name.split("."):
            linears[name] = "pooler"
        elif isinstance(module, nn.Linear):
            linears[name] = "linear" if type(module) is nn.Linear else "router"
        elif name.endswith(".experts"):
            experts.append(name)
        elif name.rpartition(".")[2] in _ROUTERS and _has_matrix(module):
            linears[name] = "router"
    keep = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    tied = _tied(model)
    stored = _stored_names(model, [*(f"{name}.weight" for name in linears), *tied.values()])
    aliases = {
        stored[f"{name}.weight"].removesuffix(".weight"): name
        for name in linears
        if stored.get(f"{name}.weight", f"{name}.weight") != f"{name}.weight"
    }
    return ModelLayers(
        config=raw,
        linears=linears | {alias: linears[name] for alias, name in aliases.items()},
        experts=tuple(experts),
        keep_fp32=tuple(sorted(keep)),
        tied=tied | {stored.get(a, a): stored.get(b, b) for a, b in tied.items()},
        aliases=aliases,
        speaks=speaks,
    )


def _stored_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The names that checkpoints use for parameters, where transformers renames while loading."""
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {}
    for name in names:
        if name in parameters:
            reverted = list(revert_weight_conversion(model, {name: parameters[name]}))
            if len(reverted) == 1:
                found[name] = reverted[0]
    return found


def _has_matrix(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2


def _tied(model: Any) -> dict[str, str]:
    """Tensor -> the tensor it repeats, as the class declares it; empty where nothing is tied."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return {}
    keys = model._tied_weights_keys
    return dict(keys) if isinstance(keys, Mapping) else {}

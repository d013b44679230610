"""Faults that a checkpoint's files show by themselves, without running a model.

Each check answers a fault seen in the wild: a BF16 linear that the config does not list (an engine
reads its bytes as FP8), a name listed as a suffix, BF16 scales, mixed precision in a fused group,
NaN bytes, a missing shard, experts stored as one 3D tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import (
    FLOATS,
    INDEX_NAME,
    CheckpointReader,
    TensorSpec,
    read_header,
    read_json,
    shard_files,
)
from swiftfp8.export.files import has_tokenizer
from swiftfp8.export.layers import ModelLayers, fused_siblings, is_language, linear_names
from swiftfp8.export.layout import Fault
from swiftfp8.export.quantize import slabs
from swiftfp8.export.scheme import INPUT_SCALE, KV_SCALES, Scheme
from swiftfp8.export.stream import in_order


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a directory's configuration says of its weights.

    `kept` are the full names of modules that it leaves unquantized; `where` is the place that
    lists them, for messages; `unknown` are entries there that name no module; `kv_scales` that the
    cache is FP8 by scales in the files. `faults` are those of the configuration itself.
    """

    scheme: Scheme
    kept: frozenset[str]
    where: str
    unknown: Sequence[str] = ()
    static_inputs: bool = False
    kv_scales: bool = False
    faults: list[Fault] = field(default_factory=list)


def check_quantized(directory: Path, layers: ModelLayers, declared: Declared) -> list[Fault]:
    """Every fault of a quantized directory that shows in its files."""
    faults = check_files(directory)
    if any(fault.where != TOKENIZER for fault in faults):
        return [*faults, *declared.faults]
    reader = CheckpointReader(directory)
    try:
        faults += declared.faults
        faults += check_tied(directory, layers)
        faults += _check_names(declared, layers, reader.specs)
        for spec in reader.specs.values():
            if spec.dtype == "F8_E4M3":
                faults += _check_weight(spec, reader, declared)
            elif _is_lone_scale(spec, reader.specs):
                faults.append(Fault(where=spec.name, what="is the scale of no FP8 weight"))
        faults += _check_kv_scales(declared, layers, reader)
        faults += _check_bytes(reader)
        faults += _check_groups(declared.scheme, reader)
    finally:
        reader.close()
    return faults


TOKENIZER = "tokenizer"
# JSON that an engine reads beside config.json.
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def check_files(directory: Path) -> list[Fault]:
    """Missing shards, truncated files, an index that disagrees with the files, no tokenizer."""
    faults = []
    try:
        read_json(directory / "config.json")
        files = shard_files(directory)
    except SwiftFP8Error as error:
        return [Fault(where=error.where or str(directory), what=error.what)]
    found: dict[str, str] = {}
    for file in files:
        try:
            found |= {spec.name: file.name for spec, _ in read_header(file)}
        except SwiftFP8Error as error:
            faults.append(Fault(where=file.name, what=error.what))
    if not faults and (directory / INDEX_NAME).is_file():
        faults += _check_index(read_json(directory / INDEX_NAME)["weight_map"], found)
    if not has_tokenizer(directory):
        faults.append(Fault(where=TOKENIZER, what="no tokenizer files"))
    for name in _BESIDE:
        try:
            if (directory / name).is_file():
                read_json(directory / name)
        except SwiftFP8Error as error:
            faults.append(Fault(where=name, what=error.what))
    return faults


def check_tied(directory: Path, layers: ModelLayers) -> list[Fault]:
    """A tied tensor must be stored once."""
    names = CheckpointReader(directory).specs
    return [
        Fault(where=name, what=f"is tied to {twin} and stored a second time")
        for name, twin in layers.tied.items()
        if name in names and twin in names
    ]


def check_unquantized(directory: Path, layers: ModelLayers) -> list[Fault]:
    """Complete files, and no FP8 that nothing declares."""
    faults = check_files(directory)
    if any(fault.where != TOKENIZER for fault in faults):
        return faults
    odd = [
        Fault(where=spec.name, what=f"is {spec.dtype}, and config.json has no quantization_config")
        for spec in CheckpointReader(directory).specs.values()
        if spec.dtype.startswith("F8")
    ]
    return [*faults, *odd, *check_tied(directory, layers)]


def module_names(directory: Path, layers: ModelLayers) -> set[str]:
    """Modules of the model that a list of exceptions can name."""
    names = set(layers.linears) | set(layers.experts) | {"lm_head"}
    try:
        stored = CheckpointReader(directory).specs
    except SwiftFP8Error:
        return names  # `check_files` says what is wrong
    return names | {name.removesuffix(".weight") for name in stored if name.endswith(".weight")}


def _check_index(weight_map: Mapping[str, str], found: Mapping[str, str]) -> list[Fault]:
    return [
        Fault(
            where=name,
            what=f"is in {found.get(name, 'no file')}, the index says {weight_map.get(name)}",
        )
        for name in sorted(weight_map.keys() | found.keys())
        if weight_map.get(name) != found.get(name)
    ]


def _check_names(
    declared: Declared, layers: ModelLayers, specs: Mapping[str, TensorSpec]
) -> list[Fault]:
    heads = {name for name, kind in layers.linears.items() if kind == "head"}
    faults = [
        Fault(where=declared.where, what=f"the output head {name} is not listed")
        for name in sorted(heads - declared.kept)
    ]
    faults += [
        Fault(where=declared.where, what=f"'{name}' is no full name of a linear")
        for name in declared.unknown
    ]
    for name in sorted(linear_names(layers, specs)):
        dtype = specs[f"{name}.weight"].dtype
        if dtype == "F8_E4M3" and name in heads:
            faults.append(Fault(where=name, what="the output head is quantized"))
        elif dtype == "F8_E4M3" and name in declared.kept:
            faults.append(Fault(where=name, what="is FP8 but listed as not converted"))
        elif dtype != "F8_E4M3" and name not in declared.kept | heads:
            faults.append(Fault(where=name, what=f"is {dtype} but not listed"))
    for spec in specs.values():
        module = next((m for m in layers.experts if spec.name.startswith(f"{m}.")), None)
        fp8 = spec.dtype == "F8_E4M3"  # said below, listed or not
        if module and len(spec.shape) == 3 and not fp8 and module not in declared.kept:
            what = (
                f"holds all experts as {spec.dtype} with 3 dimensions, and {module} is not listed"
            )
            faults.append(Fault(where=spec.name, what=what))
    return faults


def _check_weight(spec: TensorSpec, reader: CheckpointReader, declared: Declared) -> list[Fault]:
    """Shape and scale of one FP8 weight."""
    if len(spec.shape) != 2:
        return [Fault(where=spec.name, what=f"is FP8 with {len(spec.shape)} dimensions, not 2")]
    scheme = declared.scheme
    faults = _check_shape(spec, scheme)
    faults += _check_scale(
        spec, spec.name + scheme.scale_suffix, scheme.scale_shape(spec.shape), reader
    )
    if declared.static_inputs:
        scale_name = f"{spec.name.removesuffix('.weight')}.{INPUT_SCALE}"
        faults += _check_scale(spec, scale_name, (), reader)
    return faults


def _check_kv_scales(
    declared: Declared, layers: ModelLayers, reader: CheckpointReader
) -> list[Fault]:
    """Both scales for every attention module of the language model, or none where none are told."""
    stored = {name for name in reader.specs if name.endswith((".k_scale", ".v_scale"))}
    if not declared.kv_scales:
        what = "is a scale for an FP8 cache, and the configuration has no kv_cache_scheme"
        return [Fault(where=name, what=what, severity="warning") for name in sorted(stored)[:1]]
    faults = []
    modules = {name.rpartition(".")[0] for name in stored} | {
        name.rpartition(".")[0]
        for name in linear_names(layers, reader.specs)
        if name.endswith((".k_proj", ".qkv_proj")) and is_language(name)
    }
    for module in sorted(modules):
        for scale in KV_SCALES:
            name = f"{module}.{scale}"
            if name not in reader.specs:
                faults.append(Fault(where=module, what=f"has no {scale}"))
                continue
            spec = reader.specs[name]
            faults += _check_scale(spec, name, (1,), reader)
    return faults


def _check_bytes(reader: CheckpointReader) -> list[Fault]:
    """Every byte of the FP8 weights is read, and of the floats beside them."""
    slices = (
        (spec.name, start, stop)
        for spec in reader.specs.values()
        if spec.dtype == "F8_E4M3" or (spec.dtype in FLOATS and not _is_any_scale(spec.name))
        for start, stop in slabs(spec.rows, spec.columns, 1)
    )
    found = in_order(slices, lambda part: (part[0], _has_nan(reader.rows(*part))))
    names = dict.fromkeys(name for name, damaged in found if damaged)
    return [
        Fault(
            where=name,
            what="holds NaN bytes"
            if reader.specs[name].dtype == "F8_E4M3"
            else "holds NaN or infinity",
        )
        for name in names
    ]


def _is_any_scale(name: str) -> bool:
    return name.endswith(("_scale", "_scale_inv"))  # `_check_scale` reads them


def _has_nan(data: Tensor) -> bool:
    """Whether e4m3 data has 0x7F, the largest byte with a sign, or 0xFF, the largest without.

    Other floats may not be infinite either.
    """
    if not data.numel():
        return False
    if data.dtype != torch.float8_e4m3fn:
        return not bool(torch.isfinite(torch.stack(torch.aminmax(data))).all())
    signed, unsigned = data.view(torch.int8).amax(), data.view(torch.uint8).amax()
    return int(signed) == 0x7F or int(unsigned) == 0xFF


def _check_shape(spec: TensorSpec, scheme: Scheme) -> list[Fault]:
    """Whole blocks. Rows left over are a warning where no engine fuses or splits the layer."""
    rows_fit, columns_fit = (n % m == 0 for n, m in zip(spec.shape, scheme.multiple, strict=True))
    if rows_fit and columns_fit:
        return []
    alone = columns_fit and not fused_siblings(spec.name.removesuffix(".weight"))
    what = f"shape {spec.shape} is no multiple of {scheme.multiple}"
    return [Fault(where=spec.name, what=what, severity="warning" if alone else "error")]


def _check_scale(
    spec: TensorSpec, name: str, shape: tuple[int, ...], reader: CheckpointReader
) -> list[Fault]:
    scale = reader.specs.get(name)
    if scale is None:
        return [Fault(where=spec.name, what=f"has no {name.rpartition('.')[2]}")]
    if scale.dtype != "F32":
        return [Fault(where=scale.name, what=f"is {scale.dtype}, not F32")]
    if _without_last_ones(scale.shape) != _without_last_ones(shape):
        return [Fault(where=scale.name, what=f"has shape {scale.shape}, not {shape}")]
    values = reader.rows(scale.name)
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        return [Fault(where=scale.name, what="holds scales that are not positive")]
    return []


def _without_last_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Engines take [N, 1] for [N] and [1] for [], but not [1, N]."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _check_groups(scheme: Scheme, reader: CheckpointReader) -> list[Fault]:
    """Fused linears: all FP8 or none, and one scale where a scale is for a whole tensor."""
    faults = []
    for members in _fused(reader.specs):
        weights = [reader.specs[f"{name}.weight"] for name in members]
        listed = ", ".join(members)
        if len({weight.dtype == "F8_E4M3" for weight in weights}) > 1:
            faults.append(
                Fault(where=members[0], what=f"mixed precision in a fused group: {listed}")
            )
        elif scheme.granularity == "tensor" and weights[0].dtype == "F8_E4M3":
            names = [weight.name + scheme.scale_suffix for weight in weights]
            known = [name for name in names if name in reader.specs]
            if len({reader.rows(name).float().sum().item() for name in known}) > 1:
                what = f"a fused group has several scales, engines quantize it again: {listed}"
                faults.append(Fault(where=members[0], what=what, severity="warning"))
    return faults


def _fused(specs: Iterable[str]) -> list[list[str]]:
    modules = {name.removesuffix(".weight") for name in specs if name.endswith(".weight")}
    groups = {tuple(fused_siblings(name)) for name in modules} - {()}
    return [[name for name in group if name in modules] for group in sorted(groups)]


def _is_lone_scale(spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> bool:
    for suffix in ("_scale_inv", "_scale"):
        if spec.name.endswith(f".weight{suffix}"):
            weight = specs.get(spec.name.removesuffix(suffix))
            return weight is None or weight.dtype != "F8_E4M3"
    return False

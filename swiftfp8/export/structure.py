"""Faults that a checkpoint's files show by themselves, without running a model.

Each check answers a fault seen in the wild: a BF16 linear that the config does not list (an engine
reads its bytes as FP8), a name listed as a suffix, BF16 scales, mixed precision in a fused group,
NaN bytes, a missing shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import (
    INDEX_NAME,
    CheckpointReader,
    TensorSpec,
    read_header,
    read_json,
    shard_files,
)
from swiftfp8.export.files import has_tokenizer
from swiftfp8.export.layers import ModelLayers, fused_siblings, linear_names
from swiftfp8.export.layout import Fault
from swiftfp8.export.quantize import BLOCK, slabs

_SECTION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_SCALE = "_scale_inv"


def check_fp8_block(directory: Path, layers: ModelLayers) -> list[Fault]:
    """Every fault of a 128x128 block FP8 directory that shows in its files."""
    faults = check_files(directory)
    if any(fault.severity == "error" for fault in faults):
        return faults
    section = layers.config.get("quantization_config")
    if not isinstance(section, Mapping):
        return [*faults, Fault(where="config.json", what="has no quantization_config")]
    reader = CheckpointReader(directory)
    try:
        faults += _check_section(section)
        faults += check_tied(directory, layers)
        faults += _check_names(section, layers, reader.specs)
        for spec in reader.specs.values():
            if spec.dtype == "F8_E4M3":
                faults += _check_weight(spec, reader)
            elif spec.name.endswith(_SCALE) and _fp8_of(spec.name, reader.specs) is None:
                faults.append(Fault(where=spec.name, what="is the scale of no FP8 weight"))
        faults += _check_groups(reader.specs)
    finally:
        reader.close()
    return faults


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
        faults.append(Fault(where="tokenizer", what="no tokenizer files", severity="warning"))
    return faults


def check_tied(directory: Path, layers: ModelLayers) -> list[Fault]:
    """A tied tensor must be stored once."""
    names = CheckpointReader(directory).specs
    return [
        Fault(where=name, what=f"is tied to {twin} and stored a second time")
        for name, twin in layers.tied.items()
        if name in names and twin in names
    ]


def _check_index(weight_map: Mapping[str, str], found: Mapping[str, str]) -> list[Fault]:
    return [
        Fault(
            where=name,
            what=f"is in {found.get(name, 'no file')}, the index says {weight_map.get(name)}",
        )
        for name in sorted(weight_map.keys() | found.keys())
        if weight_map.get(name) != found.get(name)
    ]


def _check_section(section: Mapping[str, Any]) -> list[Fault]:
    where = "config.json: quantization_config"
    faults = [
        Fault(where=where, what=f"{key} is {section.get(key)!r}, not {value!r}")
        for key, value in _SECTION.items()
        if section.get(key, value if key == "fmt" else None) != value
    ]
    if list(section.get("weight_block_size") or ()) != list(BLOCK):
        faults.append(Fault(where=where, what=f"weight_block_size is not {list(BLOCK)}"))
    return faults


def _check_names(
    section: Mapping[str, Any], layers: ModelLayers, specs: Mapping[str, TensorSpec]
) -> list[Fault]:
    listed = set(section.get("modules_to_not_convert") or section.get("ignored_layers") or ())
    where = "config.json: modules_to_not_convert"
    heads = {name for name, kind in layers.linears.items() if kind == "head"}
    present = set(linear_names(layers, specs))
    faults = [
        Fault(where=where, what=f"the output head {name} is not listed")
        for name in sorted(heads - listed)
    ]
    for name in sorted(listed - heads - present - layers.linears.keys() - {"lm_head"}):
        if f"{name}.weight" not in specs:
            faults.append(Fault(where=where, what=f"'{name}' is no full name of a linear"))
    for name in sorted(present):
        is_fp8 = specs[f"{name}.weight"].dtype == "F8_E4M3"
        if is_fp8 and name in heads:
            faults.append(Fault(where=name, what="the output head is quantized"))
        elif is_fp8 and name in listed:
            faults.append(Fault(where=name, what="is FP8 but listed as not converted"))
        elif not is_fp8 and name not in listed | heads:
            faults.append(
                Fault(where=name, what=f"is {specs[f'{name}.weight'].dtype} but not listed")
            )
    return faults


def _check_weight(spec: TensorSpec, reader: CheckpointReader) -> list[Fault]:
    """Shape, scale and bytes of one FP8 weight."""
    if len(spec.shape) != 2:
        return [Fault(where=spec.name, what=f"is FP8 with {len(spec.shape)} dimensions, not 2")]
    faults = []
    if any(length % block for length, block in zip(spec.shape, BLOCK, strict=True)):
        faults.append(Fault(where=spec.name, what=f"shape {spec.shape} is no multiple of {BLOCK}"))
    scale = reader.specs.get(spec.name + _SCALE)
    expected = tuple(-(-n // block) for n, block in zip(spec.shape, BLOCK, strict=True))
    if scale is None:
        faults.append(Fault(where=spec.name, what="has no weight_scale_inv"))
    elif scale.dtype != "F32":
        faults.append(Fault(where=scale.name, what=f"is {scale.dtype}, not F32"))
    elif scale.shape != expected:
        faults.append(Fault(where=scale.name, what=f"has shape {scale.shape}, not {expected}"))
    else:
        values = reader.rows(scale.name)
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            faults.append(Fault(where=scale.name, what="holds scales that are not positive"))
    if any(
        bool(((reader.rows(spec.name, a, b).view(torch.uint8) & 0x7F) == 0x7F).any())
        for a, b in slabs(spec.rows, spec.columns, 1)
    ):
        faults.append(Fault(where=spec.name, what="holds NaN bytes"))
    return faults


def _check_groups(specs: Mapping[str, TensorSpec]) -> list[Fault]:
    return [
        Fault(where=members[0], what=f"mixed precision in a fused group: {', '.join(members)}")
        for members in _fused(specs)
        if len({specs[f"{name}.weight"].dtype == "F8_E4M3" for name in members}) > 1
    ]


def _fused(specs: Iterable[str]) -> list[list[str]]:
    modules = {name.removesuffix(".weight") for name in specs if name.endswith(".weight")}
    groups = {tuple(fused_siblings(name)) for name in modules} - {()}
    return [[name for name in group if name in modules] for group in sorted(groups)]


def _fp8_of(scale: str, specs: Mapping[str, TensorSpec]) -> TensorSpec | None:
    weight = specs.get(scale.removesuffix(_SCALE))
    return weight if weight and weight.dtype == "F8_E4M3" else None

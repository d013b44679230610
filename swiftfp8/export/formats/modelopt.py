"""NVIDIA ModelOpt's FP8: one scale per weight, one static scale per input.

A quantized linear has `<name>.weight` [N, K] in e4m3, `<name>.weight_scale` [] (the same for q, k
and v and for gate and up) and `<name>.input_scale` [], both float32. Input scales are the largest
magnitude seen on real rows / 448, so this format needs rows. hf_quant_config.json says so to
TensorRT-LLM, SGLang and vLLM, and config.json says the same in newer words. transformers knows
neither and loads nonsense without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from swiftfp8 import __version__
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import read_json
from swiftfp8.export.files import MODELOPT_CONFIG
from swiftfp8.export.layers import Decision, ModelLayers
from swiftfp8.export.layout import Fault, FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.scheme import (
    Scheme,
    describe_weights,
    kept_names,
    reference_weights,
    write_weights,
)
from swiftfp8.export.section import odd_types
from swiftfp8.export.source import Source
from swiftfp8.export.structure import Declared, check_quantized, module_names

NAME = "modelopt"
STATIC_INPUTS = "always"
SCHEME = Scheme(format=NAME, granularity="tensor", scale_suffix="_scale", multiple=(16, 16))


def describe(source: Source, options: FormatOptions) -> Layout:
    """Quantize every linear whose dimensions are multiples of 16, with its fused siblings."""
    return describe_weights(SCHEME, source, options, _section)


def write(source: Source, layout: Layout, directory: Path, job: WriteJob) -> tuple[LayerError, ...]:
    """The weights, and hf_quant_config.json."""
    assert layout.config is not None and layout.input_amax is not None
    section = layout.config["quantization_config"]
    legacy = {
        "producer": section["producer"],
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "exclude_modules": section["ignore"],
        },
    }
    text = json.dumps(legacy, indent=2) + "\n"
    (directory / MODELOPT_CONFIG).write_text(text, encoding="utf-8")
    return write_weights(SCHEME, source, layout, directory, job)


def reference(source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The merged tensors, those of quantized linears through FP8 and back."""
    return reference_weights(SCHEME, source, layout)


def verify(directory: Path, layers: ModelLayers) -> list[Fault]:
    """All that headers, bytes and hf_quant_config.json must satisfy."""
    if not (directory / MODELOPT_CONFIG).is_file():
        return [Fault(where=MODELOPT_CONFIG, what="is missing: engines know the format by it")]
    try:
        legacy = read_json(directory / MODELOPT_CONFIG)
    except SwiftFP8Error as error:
        return [Fault(where=MODELOPT_CONFIG, what=error.what)]
    section, newer = legacy.get("quantization") or {}, layers.config.get("quantization_config")
    odd = (
        odd_types(legacy, {"quantization": "an object"}, MODELOPT_CONFIG)
        or odd_types(section, {"exclude_modules": "a list of names"}, MODELOPT_CONFIG)
        or odd_types(newer or {}, {"ignore": "a list of names"}, "config.json")
    )
    if odd:
        return odd
    return check_quantized(directory, layers, _declared(directory, layers, section))


def _declared(directory: Path, layers: ModelLayers, section: Mapping[str, Any]) -> Declared:
    where = f"{MODELOPT_CONFIG}: quantization"
    faults = []
    if str(section.get("quant_algo")).upper() != "FP8":
        faults.append(Fault(where=where, what=f"quant_algo is {section.get('quant_algo')!r}"))
    patterns = list(section.get("exclude_modules") or ())
    newer = (layers.config.get("quantization_config") or {}).get("ignore")
    if newer is not None and sorted(newer) != sorted(patterns):
        faults.append(Fault(where=where, what="exclude_modules and config.json's ignore differ"))
    known = module_names(directory, layers)
    kept = {name for name in known if any(fnmatchcase(name, p) for p in patterns)}
    return Declared(
        scheme=SCHEME,
        kept=frozenset(kept),
        unknown=[p for p in patterns if not any(fnmatchcase(name, p) for name in known)],
        where=f"{where}.exclude_modules",
        static_inputs=True,
        faults=faults,
    )


def _section(source: Source, decisions: tuple[Decision, ...]) -> dict[str, Any]:
    section = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "producer": {"name": "swiftfp8", "version": __version__},
        "ignore": kept_names(source, decisions),
    }
    return {"quantization_config": section}

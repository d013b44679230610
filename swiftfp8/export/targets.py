"""Which engine loads which format, as data; and the format for a model and an engine.

The table is what the engines do today, not what their manuals promise. Reasons are what the user
is told where a format is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import util
from math import prod

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.layers import decide
from swiftfp8.export.layout import FormatOptions
from swiftfp8.export.quantize import BLOCK
from swiftfp8.export.source import Source

NONSENSE = "reads its weights without their scales and talks nonsense, without a word"
_DYNAMIC = "takes one scale per weight only with static activation scales"
_BY_CHANNEL = "does not read compressed-tensors"

# engine -> format -> why it can't load it; None where it can.
ENGINES: Mapping[str, Mapping[str, str | None]] = {
    "vllm": {
        "fp8_block": None,
        "compressed_tensors": None,
        "fp8": None,
        "modelopt": None,
        "bf16": None,
        "adapter": None,
    },
    "sglang": {
        "fp8_block": None,
        "compressed_tensors": None,
        "fp8": None,
        "modelopt": None,
        "bf16": None,
        "adapter": None,
    },
    "lmdeploy": {
        "fp8_block": None,
        "compressed_tensors": _BY_CHANNEL,
        "fp8": _DYNAMIC,
        "modelopt": "does not read ModelOpt's checkpoints",
        "bf16": None,
        "adapter": None,
    },
    "tensorrt_llm": {
        "fp8_block": None,
        "compressed_tensors": None,
        "fp8": _DYNAMIC,
        "modelopt": None,
        "bf16": None,
        "adapter": None,
    },
    "transformers": {
        "fp8_block": None,
        "compressed_tensors": None,
        "fp8": NONSENSE,
        "modelopt": NONSENSE,
        "bf16": None,
        "adapter": None,
    },
}
# format -> why its activations have no static scales.
_NO_STATIC: Mapping[str, str] = {
    "fp8_block": "engines scale its activations in groups of 128 as they come",
    "bf16": "nothing in it is quantized",
    "adapter": "nothing in it is quantized",
}
# engine -> why it can't use scales of an FP8 cache that compressed_tensors carries.
_NO_KV_SCALES: Mapping[str, str] = {
    "lmdeploy": _BY_CHANNEL,
    "tensorrt_llm": "takes scales of its cache from ModelOpt's checkpoints alone",
    "transformers": "has no cache in FP8",
}
_ENOUGH = 0.5  # share of the linear weights from which blocks are preferred: more engines load them


def refusal(engine: str, format_name: str, *, static: bool = False) -> str | None:
    """Why an engine can't load a format, with `static` activation scales; None where it can."""
    reason = ENGINES[engine].get(format_name)
    return None if static and reason == _DYNAMIC else reason


def pick_static_format(target: str | None) -> tuple[str, str]:
    """The format for static activation scales, and why."""
    if target and ENGINES[target]["compressed_tensors"]:
        return "fp8", f"static activation scales for {target}, which {_BY_CHANNEL}"
    return "compressed_tensors", "static activation scales, with a scale per output channel"


def pick_format(source: Source, options: FormatOptions, target: str | None) -> tuple[str, str]:
    """The format for a model, and why: blocks, or channels where most weights fit no block."""
    blocks = _share(source, options, BLOCK)
    if blocks >= _ENOUGH:
        return "fp8_block", f"{blocks:.0%} of the linear weights fit 128x128 blocks"
    channels = _share(source, options, (16, 16))
    if channels <= blocks:
        return "fp8_block", f"{blocks:.0%} of the linear weights can be FP8 in any format"
    reason = f"{blocks:.0%} of the linear weights fit 128x128 blocks, {channels:.0%} fit channels"
    if target and ENGINES[target]["compressed_tensors"]:
        return "fp8_block", f"{reason}; {target} {ENGINES[target]['compressed_tensors']}"
    return "compressed_tensors", reason


def require_loadable(format_name: str, target: str | None, *, static: bool = False) -> None:
    """Raise where the engine that the user means can't load the format."""
    reason = refusal(target, format_name, static=static) if target else None
    if reason:
        assert target
        loads = [name for name, reason in ENGINES[target].items() if reason is None]
        raise SwiftFP8Error(
            f"{target} can't serve the format {format_name}: it {reason}",
            where="export.target",
            fix=f"leave export.format out, or choose one of: {', '.join(loads)}"
            + (", or set export.activation_scheme=static" if reason == _DYNAMIC else ""),
        )


def require_static(format_name: str, scheme: str) -> None:
    """Raise where static activation scales are asked for and the format has none."""
    reason = _NO_STATIC.get(format_name) if scheme == "static" else None
    if reason:
        raise SwiftFP8Error(
            f"{format_name} has no static activation scales: {reason}",
            where="export.activation_scheme",
            fix="leave it out, or set export.format=compressed_tensors, fp8 or modelopt",
        )


def require_kv_cache(format_name: str, target: str | None, *, carries: bool, latent: bool) -> None:
    """Raise where nobody could use scales of an FP8 cache: the format, the engine, the model.

    `carries` is whether the format has a place for them, `latent` whether attention caches a
    compressed latent in place of keys and values.
    """
    reason = _NO_KV_SCALES.get(target) if target else None
    if latent:
        reason = "this model caches a latent, and no keys and values that a scale would be for"
    elif not carries:
        reason = (
            f"{format_name} has no place for its scales: an engine would take 1 for all of them"
        )
    elif reason:
        reason = f"{target} {reason}"
    if reason:
        raise SwiftFP8Error(
            f"this export can't say how to keep keys and values in FP8: {reason}",
            where="export.kv_cache",
            fix="leave it out"
            + ("" if latent else ", or set export.format=compressed_tensors for vllm or sglang"),
        )


def format_warnings(format_name: str, *, static: bool = False) -> tuple[str, ...]:
    """What a user of the format must know: who would load it as garbage, and who loads it."""
    if ENGINES["transformers"].get(format_name) is None:
        return ()
    loads = engines_for(format_name, static=static)
    return (f"transformers {NONSENSE}; this format is for {', '.join(loads)}",)


def engines_for(format_name: str, *, static: bool = False) -> list[str]:
    """The engines that load a format."""
    return [engine for engine in ENGINES if refusal(engine, format_name, static=static) is None]


def why_no_reload(format_name: str) -> str | None:
    """Why plain transformers can't check an export of this format here; None where it can."""
    reason = refusal("transformers", format_name)
    if reason:
        return f"transformers {reason}"
    if format_name == "adapter":
        return "an adapter is no model by itself"
    if format_name == "compressed_tensors" and util.find_spec("compressed_tensors") is None:
        return "transformers needs the package compressed-tensors for this format"
    return None


def _share(source: Source, options: FormatOptions, multiple: tuple[int, int]) -> float:
    """Share of the linears' elements that may be FP8 where (N, K) must divide by `multiple`."""
    decisions = decide(
        source.layers,
        source.tensors,
        multiple=multiple,
        exclude=options.exclude,
        keep=options.keep,
    )
    possible = [d for d in decisions if d.reason not in ("output head", "router")]
    total = sum(prod(d.shape) for d in possible)
    return sum(prod(d.shape) for d in possible if d.quantize) / total if total else 0.0

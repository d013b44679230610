"""Whether an engine can split the export over several GPUs, found out before it is written.

Tensor parallelism gives each of n GPUs a share of every linear: rows (N / n) of q, k, v, gate and
up, columns (K / n) of the output and down projections. vLLM and SGLang raise while loading where

    the heads do not divide by n; or KV heads neither divide by n nor n by them (fewer KV heads
    than GPUs are repeated: each GPU then holds one)
    a share of an FP8 weight in blocks is not whole blocks (128 rows or columns)
    a share of another FP8 weight is no multiple of 16, which their matmuls need

The head and the embedding are padded by the engines and always split. What is the same on every
GPU (routers, the low-rank entries of MLA) is not split at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.layers import Decision
from swiftfp8.export.layout import FormatOptions, Layout
from swiftfp8.export.source import Source
from swiftfp8.registry import discover

SIZES = (1, 2, 4, 8)
"""Sizes that the report judges where the user names none."""

_HEADS = frozenset({"q_proj"})
_KV_HEADS = frozenset({"k_proj", "v_proj"})
_BY_ROWS = frozenset({"gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj"})
_BY_COLUMNS = frozenset({"o_proj", "down_proj", "w2", "out_proj"})
_WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router"})
_OTHER_FORMATS = ("compressed_tensors", "fp8", "bf16")
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class TpVerdict:
    """One number of GPUs: what keeps an engine from splitting the export over them, by layer kind.

    `layers` are the full names of linears that do not divide; `unknown` are kinds of FP8 linears
    of which it is not known how engines split them.
    """

    size: int
    problems: tuple[str, ...]
    layers: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing is known to fail."""
        return not self.problems


def judge_tp(source: Source, layout: Layout, sizes: Sequence[int] = SIZES) -> list[TpVerdict]:
    """A verdict for every size; [] where the export is no model by itself."""
    if layout.config is None:
        return []
    decisions = layout.decisions or _unquantized(source)
    heads, kv_heads = _heads(source.layers.config)
    return [_verdict(size, decisions, heads, kv_heads, _multiple(layout.format)) for size in sizes]


def require_tp(
    source: Source, layout: Layout, options: FormatOptions, sizes: Sequence[int]
) -> None:
    """Raise where an engine could not split the export over a number of GPUs that was asked for."""
    bad = [verdict for verdict in judge_tp(source, layout, sizes) if not verdict.fits]
    if not bad:
        return
    told = "; ".join(f"tp={v.size}: {', '.join(v.problems)}" for v in bad)
    layers = list(dict.fromkeys(name for verdict in bad for name in verdict.layers))
    listed = ", ".join(layers[:_SHOWN]) + (f" and {len(layers) - _SHOWN} more" * (len(layers) > 3))
    raise SwiftFP8Error(
        f"engines can't split this export in the format {layout.format} as asked: {told}"
        + (f" ({listed})" if layers else ""),
        where="export.tp",
        fix=_alternatives(source, layout, options, sizes, bad),
    )


def tp_text(verdicts: Sequence[TpVerdict]) -> str:
    """The verdicts in a line: `1, 2 yes; 4 no: ...`; of several problems, the first."""
    good = [str(verdict.size) for verdict in verdicts if verdict.fits]
    parts = [f"{', '.join(good)} yes"] if good else []
    parts += [f"{v.size} no: {_first(v.problems)}" for v in verdicts if not v.fits]
    unknown = sorted({name for verdict in verdicts for name in verdict.unknown})
    if unknown:
        parts.append(f"not judged: {', '.join(unknown)}")
    return "; ".join(parts)


def _first(problems: Sequence[str]) -> str:
    more = len(problems) - 1
    return problems[0] + (f" and {more} more in export_report.json" if more else "")


def _verdict(
    size: int, decisions: Sequence[Decision], heads: int, kv_heads: int, multiple: int
) -> TpVerdict:
    problems: dict[str, None] = {}
    layers: list[str] = []
    unknown: dict[str, None] = {}
    if size > 1 and heads % size:
        problems[f"{heads} attention heads do not divide by {size}"] = None
    if size > 1 and kv_heads % size and size % kv_heads:
        problems[f"{kv_heads} KV heads neither divide by {size} nor {size} by them"] = None
    for decision in decisions if size > 1 else ():
        if len(decision.shape) != 2 or decision.reason in ("output head", "router"):
            continue
        kind = decision.name.rpartition(".")[2]
        rows, columns = decision.shape
        wanted = multiple if decision.quantize else 1
        if kind in _BY_COLUMNS:
            side, length, share = "in", columns, columns / size
        elif kind in _BY_ROWS or (kind in _HEADS and not heads % size):
            side, length, share = "out", rows, rows / size
        elif kind in _KV_HEADS and not (kv_heads % size and size % kv_heads):
            side, length, share = "out", rows, rows / min(size, kv_heads)
        else:
            if decision.quantize and kind not in _HEADS | _KV_HEADS | _WHOLE:
                unknown[kind] = None
            continue
        if share % wanted:
            why = f"blocks of {wanted}" if wanted > 16 else f"multiples of {wanted}"
            whole = "a whole number" if wanted == 1 else why
            problems[f"{kind} {side} {length} gives {share:g} a GPU, not {whole}"] = None
            layers.append(decision.name)
    return TpVerdict(
        size=size, problems=tuple(problems), layers=tuple(layers), unknown=tuple(unknown)
    )


def _alternatives(
    source: Source,
    layout: Layout,
    options: FormatOptions,
    sizes: Sequence[int],
    bad: Sequence[TpVerdict],
) -> str:
    """Formats that divide by every size, layers to leave in BF16, and sizes that fit."""
    formats = discover("swiftfp8.export.formats")
    ways = []
    for name in _OTHER_FORMATS:
        if name != layout.format and _divides(source, formats[name], options, sizes):
            ways.append(f"export.format={name}")
            break
    kinds = sorted({name.rpartition(".")[2] for verdict in bad for name in verdict.layers})
    if kinds and layout.quantized:
        excluding = FormatOptions(exclude=[*options.exclude, *kinds], keep=options.keep)
        if _divides(source, formats[layout.format], excluding, sizes):
            ways.append(f"export.exclude=[{','.join(kinds)}] (these stay in BF16)")
    fitting = [size for size in sizes if size not in {verdict.size for verdict in bad}]
    if fitting:
        ways.append(f"export.tp={fitting}".replace(" ", ""))
    return ", or ".join(ways) or "serve it on one GPU, or split it by pipeline stages"


def _divides(source: Source, other: Any, options: FormatOptions, sizes: Sequence[int]) -> bool:
    """Whether another format, or other exceptions, would divide by every size."""
    try:
        layout = other.describe(source, options)
    except SwiftFP8Error:  # nothing of this model can be in that format
        return False
    return all(verdict.fits for verdict in judge_tp(source, layout, sizes))


def _multiple(format_name: str) -> int:
    """What the shares of FP8 weights must be divisible by."""
    scheme = getattr(discover("swiftfp8.export.formats")[format_name], "SCHEME", None)
    return int(scheme.multiple[0]) if scheme else 1


def _unquantized(source: Source) -> list[Decision]:
    """The linears of an export that quantizes nothing and so decides nothing."""
    return [
        Decision(
            name=name,
            shape=source.tensors[f"{name}.weight"].shape,
            quantize=False,
            reason="output head" if kind == "head" else kind,
        )
        for name, kind in source.layers.linears.items()
        if f"{name}.weight" in source.tensors
    ]


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """(attention heads, KV heads); 1 where the configuration does not say, which divides shares."""
    text = config.get("text_config")
    section = text if isinstance(text, Mapping) else config
    heads = int(section.get("num_attention_heads") or 1)
    return heads, int(section.get("num_key_value_heads") or heads)

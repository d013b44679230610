"""The precision ladder: from what was asked to what this hardware gives, with the reasons.

    the asked recipe, then mxfp8, fp8_block, fp8_current, fp8_delayed, then bf16, fp16, fp32

The first rung that the device and the backend (Transformer Engine, or PyTorch alone) allow is
taken. `precision.recipe=auto` asks for no recipe in particular and takes MXFP8 where there is
Blackwell, else current scaling. FP8 that can't be had falls to the compute dtype, unless emulation
was asked for. A rung that was asked for and not given is a `Fallback`: one line, with its reason,
never silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftfp8.hardware import ALL_FP8, Hardware, install_hint

if TYPE_CHECKING:
    from swiftfp8.config.schema import PrecisionConfig

LADDER = ALL_FP8
HIGH_LADDER = ("bf16", "fp16", "fp32")
# What `auto` tries, and why it stops there.
AUTO = {
    "mxfp8": "Blackwell multiplies it natively, with a scale for every 32 values",
    "fp8_current": "its scales come from the tensor at hand, with no history to warm up or to "
    "save, and its matmuls are faster than block scaling's",
    "fp8_delayed": "it is the first recipe that runs here",
    "fp8_block": "it is the first recipe that runs here",
}
TORCH_NOTE = (
    "the torch backend scales each token and each output channel, keeps gradients in e4m3, and "
    "runs decoder layers, their LoRA and the loss fused where their form allows"
)
EMULATED_DEFAULT = "fp8_current"


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A wish that was not granted: asked for, given instead, and why; `fix` is what would help."""

    asked: str
    given: str
    reason: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True)
class Granted:
    """What the ladder gives: FP8 with `recipe` and `backend`, or neither.

    `compute_dtype` runs everything outside FP8; `high_reason` says why a linear stays there when
    `recipe` is None.
    """

    recipe: str | None
    backend: str | None
    compute_dtype: str
    high_reason: str
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = ()


def climb(dtype: str, precision: PrecisionConfig, hardware: Hardware, backend: str) -> Granted:
    """Find the first rung that holds, from `dtype` and the `precision` options, on `backend`.

    `backend` is `precision.backend`, or what `auto` became.
    """
    if dtype != "fp8":
        return _high_only(dtype, hardware)
    compute_dtype, skipped = _first_high("bf16", hardware)
    if backend != "emulated":
        granted = _hardware_fp8(precision.recipe, backend, compute_dtype, hardware)
        if granted is not None:
            return granted
    why_not = _why_not(backend, hardware)
    reason = why_not("fp8_current") or "no FP8 recipe runs here"
    if backend == "emulated" or precision.emulate:
        return _emulated(precision, compute_dtype, skipped, reason)
    full_reason = "; ".join([reason, *skipped])
    fallback = Fallback(
        asked="fp8", given=compute_dtype, reason=full_reason, fix=_fix_for(hardware, compute_dtype)
    )
    return Granted(
        recipe=None,
        backend=None,
        compute_dtype=compute_dtype,
        high_reason=full_reason,
        fallbacks=(fallback,),
    )


def _high_only(dtype: str, hardware: Hardware) -> Granted:
    given, skipped = _first_high(dtype, hardware)
    fallbacks: tuple[Fallback, ...] = ()
    if given != dtype:
        fallbacks = (
            Fallback(asked=dtype, given=given, reason="; ".join(skipped), fix=f"set dtype={given}"),
        )
    return Granted(
        recipe=None,
        backend=None,
        compute_dtype=given,
        high_reason=f"dtype={dtype}",
        fallbacks=fallbacks,
    )


def _first_high(asked: str, hardware: Hardware) -> tuple[str, list[str]]:
    """The first of `asked`, bf16, fp16, fp32 that runs here, and why the ones before do not."""
    skipped: list[str] = []
    for dtype in (asked, *HIGH_LADDER):
        reason = hardware.why_not(dtype)
        if reason is None:
            return dtype, skipped
        if reason not in skipped:
            skipped.append(reason)
    return "fp32", skipped


def _why_not(backend: str, hardware: Hardware) -> Callable[[str], str | None]:
    """What tells why a recipe can't run on a backend."""
    return hardware.why_not_torch if backend == "torch" else hardware.why_not


def _hardware_fp8(
    asked: str, backend: str, compute_dtype: str, hardware: Hardware
) -> Granted | None:
    """FP8 on Transformer Engine or on PyTorch alone, or None where no recipe runs."""
    why_not = _why_not(backend, hardware)
    rungs = tuple(AUTO) if asked == "auto" else (asked, *LADDER)
    recipe = next((rung for rung in rungs if why_not(rung) is None), None)
    if recipe is None:
        return None
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = ()
    if asked == "auto":
        notes = (f"precision.recipe=auto took {recipe}: {AUTO[recipe]}",)
    elif recipe != asked:
        reason = why_not(asked)
        assert reason is not None
        fix = f"set precision.recipe={recipe} or auto"
        fallbacks = (Fallback(asked=asked, given=recipe, reason=reason, fix=fix),)
    if backend == "torch":
        notes += (TORCH_NOTE,)
    elif not hardware.probed:
        notes += ("Transformer Engine is taken as installed on hardware that is given by hand",)
    return Granted(
        recipe=recipe,
        backend="torch" if backend == "torch" else "te",
        compute_dtype=compute_dtype,
        high_reason="",
        fallbacks=fallbacks,
        notes=notes,
    )


def _emulated(
    precision: PrecisionConfig, compute_dtype: str, skipped: list[str], reason: str
) -> Granted:
    """FP8 numerics on any device: rounded as FP8 rounds, multiplied in the compute dtype."""
    fallbacks: tuple[Fallback, ...] = ()
    if precision.backend in ("te", "torch"):
        asked, fix = f"backend {precision.backend}", "set precision.backend=auto"
        fallbacks = (Fallback(asked=asked, given="emulated", reason=reason, fix=fix),)
    cost = f"FP8 is emulated: its numerics in {compute_dtype} matmuls, neither faster nor smaller"
    recipe = EMULATED_DEFAULT if precision.recipe == "auto" else precision.recipe
    return Granted(
        recipe=recipe,
        backend="emulated",
        compute_dtype=compute_dtype,
        high_reason="",
        fallbacks=fallbacks,
        notes=(cost, *(f"what is not FP8 runs in {compute_dtype}: {why}" for why in skipped)),
    )


def _fix_for(hardware: Hardware, given: str) -> str:
    """What a user can do who wants FP8 and nothing else."""
    if "fp8_current" not in hardware.unavailable:  # the device could, the library can't
        alone = hardware.why_not_torch("fp8_current") is None
        other = "; or set precision.backend=torch, which needs none" if alone else ""
        return f"{install_hint(hardware.cuda_version)}, then swiftfp8 doctor{other}"
    return (
        f"run on a GPU of compute capability 8.9 or newer, set dtype={given}, or set "
        "precision.emulate=true for FP8's numerics without its speed"
    )

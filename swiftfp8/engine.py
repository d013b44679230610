"""Who runs FP8 under `precision.backend=auto`: Transformer Engine, or PyTorch and Triton alone.

The torch engine is ahead where it runs a decoder layer, LoRA included, as one function, and, with
tuner=full, where it compiles layers of that form. Where it can't (another form of layer, dropout on
LoRA), Transformer Engine's linears are taken. Only the engines of `AUTO_ENGINES` are, in the order
in which one that would do as well as another is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swiftfp8.hardware import TORCH_RECIPES, Hardware

# Measured best first: see docs/benchmarks.md.
AUTO_ENGINES: tuple[str, ...] = ("torch", "te")
# Compute capabilities on which the torch engine was measured against Transformer Engine.
TORCH_MEASURED = ((9, 0),)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A backend by name; `reason` is why `auto` took it, None where there was no choice."""

    name: str
    reason: str | None = None


def choose_engine(
    asked: str, recipe: str, hardware: Hardware, *, slow: str | None, full: bool = False
) -> Engine:
    """The backend for `precision.backend=asked`.

    `slow` is why the torch engine can't fuse the model's decoder layers, or, where all weights are
    trained (`full`), compile them; None where it can.
    """
    if asked != "auto":
        return Engine(name=asked)
    if len(AUTO_ENGINES) == 1:
        return Engine(name=AUTO_ENGINES[0])
    why_no_te = _why_no_te(recipe, hardware)
    against = list(_against_torch(recipe, hardware, slow=slow))
    if AUTO_ENGINES[0] == "te" and why_no_te is None:
        return Engine(name="te", reason="Transformer Engine runs here")
    if not against:
        why = "it runs whole decoder layers, LoRA included, in FP8"
        if full:
            why = "it compiles decoder layers, their casts to FP8 included"
        return Engine(name="torch", reason=why if why_no_te is None else f"{why}; {why_no_te}")
    if why_no_te is None:
        return Engine(name="te", reason=f"the torch engine would not be faster: {against[0]}")
    if _why_no_torch(recipe, hardware) is None:
        return Engine(name="torch", reason=why_no_te)
    return Engine(name="te")  # neither runs: the ladder goes on from here, with the reason


def _against_torch(recipe: str, hardware: Hardware, *, slow: str | None) -> Iterator[str]:
    """What speaks against the torch engine where Transformer Engine could be had."""
    if (missing := _why_no_torch(recipe, hardware)) is not None:
        yield missing
    elif slow is not None:
        yield slow
    elif hardware.sm not in TORCH_MEASURED:
        yield f"it was not measured on {hardware.name}"


def _why_no_torch(recipe: str, hardware: Hardware) -> str | None:
    return hardware.why_not_torch(TORCH_RECIPES[0] if recipe == "auto" else recipe)


def _why_no_te(recipe: str, hardware: Hardware) -> str | None:
    return hardware.why_not("fp8_current" if recipe == "auto" else recipe)

"""What a step keeps for its backward pass, and what it makes again: none, selective or full.

    none       keep all that autograd saves
    selective  keep what matmuls and attention put out, make the rest again: cheap in time
    full       keep each decoder layer's input and run the layer again: about a third more time

`auto` takes the first whose memory estimate fits the device, in this order.
"""

from __future__ import annotations

from collections.abc import Callable

from swiftfp8.memory import MemoryEstimate

CHEAPEST_FIRST = ("none", "selective", "full")
# Backends whose matmuls PyTorch's selective checkpointing can't see.
NO_SELECTIVE = {
    "te": "Transformer Engine's matmuls are hidden from PyTorch's selective checkpointing",
}
DELAYED = "emulated delayed scaling computes otherwise when a layer is recomputed"


def plan_checkpointing(
    wanted: str,
    *,
    backend: str | None,
    recipe: str | None,
    fused_layers: int,
    estimate: Callable[[str], MemoryEstimate],
) -> tuple[str, str, MemoryEstimate]:
    """The choice for `gradient_checkpointing=wanted`, its reason, and its memory estimate.

    `estimate` gives the memory of a choice.
    """
    missing = _why_no_selective(backend, recipe, fused_layers)
    if wanted == "selective" and missing is not None:
        return "full", f"selective can't be had, full is taken: {missing}", estimate("full")
    if wanted != "auto":
        return wanted, f"gradient_checkpointing={wanted}", estimate(wanted)
    over: list[str] = []
    for choice in CHEAPEST_FIRST:
        if choice == "selective" and missing is not None:
            continue
        memory = estimate(choice)
        if memory.total <= memory.available:
            why = f"it fits, {memory.total:.1f} of {memory.available:.1f} GiB by the estimate"
            reason = ", ".join([*over, why])
            return choice, f"auto: {reason}", memory
        over.append(f"{choice} would take {memory.total:.1f} GiB")
    return "full", f"auto: {', '.join(over)}, and {memory.available:.1f} GiB can be used", memory


def _why_no_selective(backend: str | None, recipe: str | None, fused_layers: int) -> str | None:
    if backend == "torch" and not fused_layers:
        return "the torch backend has it in fused layers alone, and none is fused"
    if backend == "emulated" and recipe == "fp8_delayed":
        return DELAYED
    return NO_SELECTIVE.get(backend or "")

"""What the machine can do, as plain values: probed here, or given by hand for "what if".

Every precision has either None (it works) or the reason why it does not; the plan quotes the
reason. This file and `precision/te.py` are the only ones that import Transformer Engine.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device, how many of it there are, and what runs on it.

    `sm` is the CUDA compute capability as (major, minor), None on a CPU. `memory_gib` is one
    device's memory. `unavailable` maps a precision ("mxfp8", "fp8_block", "fp8_current",
    "fp8_delayed", "bf16", "fp16", "fp32") to the reason why it can't be had here; a precision
    that is not in it works. `probed` is False for hardware given by hand.
    """

    name: str
    device: str  # "cuda" or "cpu"
    sm: tuple[int, int] | None
    memory_gib: float
    count: int = 1
    unavailable: dict[str, str]
    te_version: str | None = None
    te_reason: str | None = None
    probed: bool = True

    def why_not(self, precision: str) -> str | None:
        """The reason why `precision` can't run here, or None where it can."""
        return self.unavailable.get(precision)

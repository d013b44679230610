"""How much of an adapter's update is left after merging it into weights that were FP8 already.

A base W0 on the FP8 grid, an update U, and Q(W0 + U) rounded to the grid again: where U is smaller
than half a step, the rounding takes most values back to W0. Along the update itself,

    survival = <Q(W0 + U) - W0, U> / <U, U>

is 1 where everything is kept and 0 where nothing is. With a base in BF16 the weights lie between
the grid's points and the rounding takes sides at random, so that the update survives on average:
nothing is measured there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.layout import LayerError
from swiftfp8.export.quantize import QuantizedTensor, dequantize


@dataclass
class SurvivalMeter:
    """Adds up over slabs what is left of the update, and the update."""

    kept: float = 0.0
    total: float = 0.0

    def add(self, merged: Tensor, update: Tensor, quantized: QuantizedTensor) -> None:
        """Count a slab: `merged` is W0 + U in float32, `update` is U."""
        left = dequantize(quantized).sub_(merged).add_(update)  # Q(W0 + U) - W0
        self.kept += float(torch.dot(left.flatten(), update.flatten()))
        self.total += float(torch.dot(update.flatten(), update.flatten()))

    def include(self, other: SurvivalMeter) -> None:
        """Count what another meter has counted."""
        self.kept += other.kept
        self.total += other.total

    @property
    def share(self) -> float | None:
        """The share that survives, None where there is no update."""
        return self.kept / self.total if self.total else None


def require_survival(layers: Iterable[LayerError], least: float) -> None:
    """Raise where less than `least` of the update survives, over all layers that have one."""
    shares = {layer.name: layer.survival for layer in layers if layer.survival is not None}
    if not shares:
        return
    mean = sum(shares.values()) / len(shares)
    worst = min(shares, key=lambda name: shares[name])
    if mean < least:
        raise SwiftFP8Error(
            f"the base is FP8, and only {mean:.0%} of the adapter's update survives being merged "
            f"and rounded again (least in {worst}: {shares[worst]:.0%})",
            where="export.min_survival",
            fix="export.format=adapter keeps all of it; so does a merge into the BF16 model that "
            "the base was made from, or export.format=bf16",
        )

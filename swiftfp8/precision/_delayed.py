"""Where Transformer Engine's delayed scaling starts from, and how it survives a resume.

Transformer Engine starts every scale at 1, which flushes small weights and gradients to zero in
the first step. Here each starts from 448 / amax (57344 / amax for e5m2) of the first tensor that
it meets; from then on Transformer Engine's own updates take over.
"""

from __future__ import annotations

from typing import Any

import torch

from swiftfp8.plan import RecipeOptions
from swiftfp8.precision.recipes import AMAX_EPSILON, E4M3, amax_of, gradient_dtype

_INPUT, _WEIGHT, _GRADIENT = 0, 1, 0  # slots of te.Linear's scales, forward and backward


def starting_scale(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0) -> torch.Tensor:
    """The factor that brings amax to the format's largest value, 2**margin below it."""
    return torch.finfo(dtype).max / 2.0**margin / amax.clamp_min(AMAX_EPSILON)


class DelayedScales:
    """Delayed scaling's memory of one layer: where it starts, what a resume needs."""

    def __init__(self, recipe: RecipeOptions) -> None:
        self.recipe = recipe
        self.forward_seeded = False
        self.backward_seeded = False
        self.pending: dict[str, torch.Tensor] = {}

    def before_forward(self, te_linear: Any, rows: torch.Tensor) -> None:
        """Restore a saved state, or seed the forward scales by the first tensors seen."""
        if self.forward_seeded and not self.pending:
            return
        te_linear.init_fp8_metadata()
        if self.pending:
            self._restore(te_linear)
        if not self.forward_seeded:
            scale = te_linear.fp8_meta["scaling_fwd"].scale
            self._seed(scale[_INPUT], amax_of(rows), E4M3)
            if te_linear.weight.requires_grad:
                self._seed(scale[_WEIGHT], amax_of(te_linear.weight), E4M3)
            self.forward_seeded = True

    def before_backward(self, te_linear: Any, y: torch.Tensor) -> torch.Tensor:
        """Seed the gradient's scale by the first gradient seen."""
        if self.backward_seeded or not y.requires_grad:
            return y
        return _SeedGradientScale.apply(y, self, te_linear)

    def seed_gradient(self, te_linear: Any, dy: torch.Tensor) -> None:
        """Called by the first backward pass."""
        if not self.backward_seeded:
            scale = te_linear.fp8_meta["scaling_bwd"].scale
            self._seed(scale[_GRADIENT], amax_of(dy), gradient_dtype(self.recipe))
            self.backward_seeded = True

    def state(self, te_linear: Any) -> dict[str, torch.Tensor]:
        """Scales and histories as plain tensors on the CPU; restored ones count at once."""
        if self.pending:
            return dict(self.pending)
        tensors: dict[str, torch.Tensor] = {}
        for direction, seeded in (("fwd", self.forward_seeded), ("bwd", self.backward_seeded)):
            if seeded:
                meta = te_linear.fp8_meta[f"scaling_{direction}"]
                tensors[f"scale_{direction}"] = meta.scale.detach().cpu().clone()
                tensors[f"amax_history_{direction}"] = meta.amax_history.detach().cpu().clone()
        return tensors

    def _restore(self, te_linear: Any) -> None:
        for direction in ("fwd", "bwd"):
            if f"scale_{direction}" not in self.pending:
                continue
            meta = te_linear.fp8_meta[f"scaling_{direction}"]
            meta.scale.copy_(self.pending[f"scale_{direction}"])
            meta.amax_history.copy_(self.pending[f"amax_history_{direction}"])
            setattr(self, "forward_seeded" if direction == "fwd" else "backward_seeded", True)
        self.pending = {}

    def _seed(self, scale: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> None:
        with torch.no_grad():
            scale.copy_(starting_scale(amax, dtype, self.recipe.margin))


class _SeedGradientScale(torch.autograd.Function):
    """Identity that sees the gradient before te.Linear's backward quantizes it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, y: torch.Tensor, scales: DelayedScales, te_linear: Any
    ) -> torch.Tensor:
        ctx.scales, ctx.te_linear = scales, te_linear
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        ctx.scales.seed_gradient(ctx.te_linear, dy)
        return dy, None, None

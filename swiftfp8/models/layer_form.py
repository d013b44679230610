"""Whether a model's decoder layers have the form that the torch backend runs as one function.

Asked of a model on the meta device whose linears are still plain ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_PLAIN_LINEARS = "not all of its linears are held in row-wise FP8"  # which they will be
_WITHOUT_BIAS = ("o_proj", "gate_proj", "up_proj", "down_proj")


def why_layers_unfused(model: nn.Module) -> str | None:
    """The first reason why a decoder layer can't be fused, or None where all can."""
    from swiftfp8.precision.kernels.install import unsupported

    if not type(model).__module__.startswith("transformers."):
        return "its code comes with the checkpoint"
    layers = [x for x in model.modules() if hasattr(x, "self_attn") and hasattr(x, "mlp")]
    if not layers:
        return "its decoder layers have no self_attn and mlp"
    model.requires_grad_(False)
    reasons = [unsupported(layer) for layer in layers]
    structural = [reason for reason in reasons if reason not in (None, _PLAIN_LINEARS)]
    if structural:
        return structural[0]
    biased = [
        name
        for name, module in model.named_modules()
        if name.endswith(_WITHOUT_BIAS) and getattr(module, "bias", None) is not None
    ]
    return f"{biased[0].rpartition('.')[2]} has a bias" if biased else None

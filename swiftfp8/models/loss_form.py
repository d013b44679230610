"""Whether a causal language model's logits are its head times its last hidden state, unchanged.

That is what train/losses.py needs to compute head and loss together. What can be read from the
modules and the configuration is checked here; what a model's own code does besides is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_CHANGES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


def why_unfused(causal: Any, head_types: tuple[type[nn.Module], ...] = ()) -> str | None:
    """Why head and loss can't be fused, or None; the head is an nn.Linear or one of these types."""
    from torch import nn

    if type(getattr(causal, "lm_head", None)) not in (nn.Linear, *head_types):
        return "its head is no plain linear"
    if causal.lm_head.bias is not None:
        return "its head has a bias"
    config = causal.config
    for name in _CHANGES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            return f"its logits are changed after the head ({name})"
    if getattr(config, "output_router_logits", False):
        return "its loss has a router's part"
    return None

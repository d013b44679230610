"""Puts the fused decoder layer into a Hugging Face model, layer by layer, where a layer fits.

A layer's class is replaced by a subclass of itself, so that names, parameters, adapters and state
dicts stay what they were. With its adapters switched off and no graph asked for, as a reference for
preferences runs, the layer is fused without them. A call that the fused layer can't serve (a
key/value cache, several adapters active, FP8 switched off) goes to the layer's own forward pass,
linear by linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from swiftfp8.precision.kernels.decoder import Attention, DecoderWeights, Recompute, run_layer
from swiftfp8.precision.kernels.graphs import GraphPool, LayerGraphs, Rotary
from swiftfp8.precision.kernels.group import Adapter, Group, merge_rows
from swiftfp8.precision.kernels.quantize import E4M3
from swiftfp8.precision.kernels.rope import Heads, rotate_reference

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def fuse_model(
    model: nn.Module,
    *,
    recompute: Recompute = "cheap",
    keep_gate_up_fp8: bool = True,
    graphs: bool = False,
) -> dict[str, str | None]:
    """Fuse every decoder layer that fits; call it last, after LoRA was added and moved.

    Returns each decoder layer's name with None where it was fused, or why it was not. A model
    whose `gradient_checkpointing` is on runs with `recompute="full"`, whatever is given here. With
    `graphs`, training passes are replayed as CUDA graphs (graphs.py).
    """
    found: dict[str, str | None] = {}
    pool = GraphPool() if graphs else None
    for name, module in model.named_modules():
        if hasattr(module, "self_attn") and hasattr(module, "mlp"):
            found[name] = reason = unsupported(module)
            if reason is None:
                _install(module, recompute, keep_gate_up_fp8, pool)
    return found


def unsupported(layer: nn.Module) -> str | None:
    """Why this decoder layer can't be fused, or None where it can."""
    attention, mlp = layer.self_attn, layer.mlp
    parts = [(attention, name) for name in _ATTENTION] + [(mlp, name) for name in _MLP]
    missing = [name for owner, name in parts if not hasattr(owner, name)]
    if missing:
        return f"it has no {missing[0]}"
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    if any(norm is None or not type(norm).__name__.endswith("RMSNorm") for norm in norms):
        return "its norms are no RMSNorms"
    if "Gemma" in type(norms[0]).__name__ or hasattr(layer, "pre_feedforward_layernorm"):
        return "its norms have another form (1 + w, or four of them)"
    if any(norm.weight.requires_grad for norm in norms):
        return "its norms are trained"
    activation = getattr(mlp, "act_fn", None)
    if activation is None or type(activation).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {type(activation).__name__}, not SiLU"
    if getattr(attention, "attention_dropout", 0.0):
        return "it has attention dropout"
    return _unsupported_linears([getattr(owner, name) for owner, name in parts])


def _unsupported_linears(linears: Sequence[nn.Module]) -> str | None:
    bases = [_base(linear) for linear in linears]
    if any(not hasattr(base, "weight_bits") or not hasattr(base, "hold") for base in bases):
        return "not all of its linears are held in row-wise FP8"
    if any(base.bias is not None for base in bases[3:]):
        return "a linear besides q, k and v has a bias"
    for group in (linears[:3], linears[3:4], linears[4:6], linears[6:]):
        shapes = {_adapter_shape(linear) for linear in group if hasattr(linear, "lora_A")}
        if None in shapes:
            return "an adapter on it has dropout, or several adapters are active"
        if len(shapes) > 1:
            return "adapters that read one input differ in rank or scaling"
    return None


def _adapter_shape(linear: nn.Module) -> tuple[int, float] | None:
    active = [name for name in linear.active_adapters if name in linear.lora_A]
    if len(active) != 1 or linear.use_dora.get(active[0]):
        return None
    if not isinstance(linear.lora_dropout[active[0]], nn.Identity):
        return None
    return linear.r[active[0]], linear.scaling[active[0]]


def _active(linear: nn.Module) -> list[tuple[str, float]]:
    """A linear's active adapters, each with its scaling: what a fused layer was made with."""
    if not hasattr(linear, "lora_A"):
        return []
    return [(n, linear.scaling[n]) for n in linear.active_adapters if n in linear.lora_A]


def _install(
    layer: nn.Module, recompute: Recompute, keep_gate_up_fp8: bool, pool: GraphPool | None
) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, o = [getattr(attention, name) for name in _ATTENTION[:3]], attention.o_proj
    gate_up, down = [mlp.gate_proj, mlp.up_proj], mlp.down_proj
    width = attention.head_dim
    weights = DecoderWeights(
        qkv=_merge(qkv),
        o=_merge([o]),
        gate_up=_merge(gate_up),
        down=_merge([down]),
        norm1_K=layer.input_layernorm.weight.detach(),
        norm2_K=layer.post_attention_layernorm.weight.detach(),
        eps=layer.input_layernorm.variance_epsilon,
        heads=Heads(
            query=_base(qkv[0]).out_features // width,
            key_value=_base(qkv[1]).out_features // width,
            width=width,
        ),
        recompute=recompute,
        keep_gate_up_fp8=keep_gate_up_fp8,
    )
    state = _FusedState(weights, [*qkv, o, *gate_up, down], recompute, pool)
    object.__setattr__(layer, "fused", state)
    layer.__class__ = _fused_class(type(layer))


def _merge(linears: Sequence[nn.Module]) -> Group:
    """The group of these linears; each linear's own weight becomes a view of the merged one."""
    bases = [_base(linear) for linear in linears]
    bits = merge_rows([base.weight_bits for base in bases])
    scale = merge_rows([base.weight_scale for base in bases])
    ends: list[int] = []
    for base in bases:
        start = ends[-1] if ends else 0
        ends.append(start + base.out_features)
        base.hold(bits[start : ends[-1]], scale[start : ends[-1]])
    bias = None
    if any(base.bias is not None for base in bases):
        zeros = torch.zeros(1, dtype=bases[0].bias.dtype, device=scale.device)
        biases = [zeros.expand(b.out_features) if b.bias is None else b.bias for b in bases]
        bias = torch.cat([part.detach() for part in biases])
    return Group(
        weight8_NK=bits.view(E4M3),
        scale_N=scale,
        ends=tuple(ends),
        bias_N=bias,
        adapter=_adapter(linears),
        split_accumulator=bases[0].split_accumulator,
    )


def _adapter(linears: Sequence[nn.Module]) -> Adapter | None:
    """The active adapter of a group; a linear without one takes part with zeros."""
    adapted = [linear for linear in linears if hasattr(linear, "lora_A")]
    if not adapted:
        return None
    rank, scaling = _adapter_shape(adapted[0]) or (0, 0.0)
    a, b = [], []
    for linear in linears:
        base = _base(linear)
        if linear in adapted:
            name = linear.active_adapters[0]
            a.append(linear.lora_A[name].weight)
            b.append(linear.lora_B[name].weight)
        else:
            device = base.weight_bits.device
            a.append(torch.zeros(rank, base.in_features, device=device))
            b.append(torch.zeros(base.out_features, rank, device=device))
    return Adapter(a=tuple(a), b=tuple(b), scaling=scaling)


def _base(linear: nn.Module) -> Any:
    return getattr(linear, "base_layer", linear)


class _FusedState:
    """A fused layer's weights, and whether a call can use them."""

    def __init__(
        self,
        weights: DecoderWeights,
        linears: list[nn.Module],
        recompute: Recompute,
        pool: GraphPool | None,
    ) -> None:
        self.weights = weights
        self.bare = replace(
            weights,
            qkv=replace(weights.qkv, adapter=None),
            o=replace(weights.o, adapter=None),
            gate_up=replace(weights.gate_up, adapter=None),
            down=replace(weights.down, adapter=None),
        )
        self.linears = linears
        self.adapters = [_active(linear) for linear in linears]
        self.recompute = recompute
        self.graphs = None if pool is None else LayerGraphs(weights, pool)

    def serving(self, x: torch.Tensor, cache: Any) -> DecoderWeights | None:
        """The fused weights of plain training or evaluation, or of a pass without adapters.

        None where the call is another one.
        """
        if cache is not None or x.device != self.weights.qkv.weight8_NK.device:
            return None
        off: set[bool] = set()
        for linear, adapter in zip(self.linears, self.adapters, strict=True):
            base = _base(linear)
            if not base.enabled or base.weight_bits.device != x.device:
                return None
            if hasattr(linear, "lora_A"):
                if linear.merged or _active(linear) != adapter:
                    return None
                off.add(linear.disable_adapters)
        if True not in off:
            return self.weights
        return self.bare if off == {True} and not torch.is_grad_enabled() else None

    def count(self) -> None:
        """One pass of every linear in FP8, for the measured coverage."""
        for linear in self.linears:
            _base(linear).ran_fp8 += 1


@lru_cache
def _fused_class(original: type[nn.Module]) -> type[nn.Module]:
    plain_forward = original.forward
    fused = type(f"Fused{original.__name__}", (original,), {"__module__": original.__module__})

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        recomputes = self.training and getattr(self, "gradient_checkpointing", False)
        weights = None if args else self.fused.serving(hidden_states, cache)
        if weights is not None:
            self.fused.count()
            weights.recompute = "full" if recomputes else self.fused.recompute
            return _run(self, weights, hidden_states, **kwargs)
        if recomputes and torch.is_grad_enabled():
            call = partial(plain_forward, self, **kwargs)
            return self._gradient_checkpointing_func(call, hidden_states, *args)
        return plain_forward(self, hidden_states, *args, **kwargs)

    # Hugging Face wraps a layer's forward or its __call__ (by version) in activation
    # checkpointing. The fused layer recomputes by itself, and skips the last matmul in doing so.
    fused.forward = forward  # type: ignore[method-assign]
    fused.__call__ = nn.Module.__call__  # type: ignore[method-assign, assignment]
    return fused


def _run(
    layer: Any,
    weights: DecoderWeights,
    hidden_states: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ("cache", "past_key_values", "use_cache"):
        kwargs.pop(name, None)
    module = layer.self_attn
    implementation = module.config._attn_implementation
    attend: Callable[..., Any]
    if implementation == "eager":
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    else:
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
    sliding = getattr(module, "sliding_window", None)
    if sliding is not None:
        kwargs["sliding_window"] = sliding
    normed = hasattr(module, "q_norm")

    def make_attention(turns: Rotary | None, mask: torch.Tensor | None) -> Attention:
        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if normed:
                q, k = module.q_norm(q), module.k_norm(k)
                if turns is not None:
                    q, k = (rotate_reference(part, *turns) for part in (q, k))
            attended, _ = attend(
                module, q, k, v, mask, dropout=0.0, scaling=module.scaling, **kwargs
            )
            return attended

        return attention

    graphs = layer.fused.graphs
    if graphs is not None and _is_recordable(hidden_states, attend, kwargs):
        y = graphs.run(
            hidden_states, position_embeddings, attention_mask, make_attention, rotate=not normed
        )
        if y is not None:
            return y
    rotary = None
    if position_embeddings is not None:
        width = position_embeddings[0].shape[-1]
        cos, sin = (part.reshape(-1, width).contiguous() for part in position_embeddings)
        rotary = (cos, sin)
    return run_layer(
        hidden_states,
        weights,
        None if normed else rotary,
        make_attention(rotary, attention_mask),
    )


def _is_recordable(x: torch.Tensor, attend: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a graph sees all that this call depends on: x, mask and the rotary embedding."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    unread = ("position_ids", "cache_position", "num_items_in_batch")  # of SDPA
    tensors = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in unread]
    return (
        x.is_cuda
        and torch.is_grad_enabled()
        and attend is ALL_ATTENTION_FUNCTIONS["sdpa"]
        and not tensors
    )

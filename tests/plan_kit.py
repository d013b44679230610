"""Model shapes without models, and configurations, for tests of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftfp8.config.schema import Config
from swiftfp8.hardware import Hardware, parse_hardware
from swiftfp8.models.meta import LinearMeta, ModelMeta
from swiftfp8.plan import Plan, build_plan


def decoder_meta(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    tied: bool,
    name: str = "decoder",
    head_dim: int | None = None,
    keep_high: dict[str, str] | None = None,
) -> ModelMeta:
    """The linears of a Qwen2-like decoder, named as transformers names them."""
    head_dim = head_dim or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (hidden, q, True),
        "self_attn.k_proj": (hidden, kv, True),
        "self_attn.v_proj": (hidden, kv, True),
        "self_attn.o_proj": (q, hidden, False),
        "mlp.gate_proj": (hidden, intermediate, False),
        "mlp.up_proj": (hidden, intermediate, False),
        "mlp.down_proj": (intermediate, hidden, False),
    }
    linears = [
        LinearMeta(
            name=f"model.layers.{layer}.{part}",
            in_features=n_in,
            out_features=n_out,
            bias=bias,
            kind="linear",
            layer=layer,
        )
        for layer in range(layers)
        for part, (n_in, n_out, bias) in shapes.items()
    ]
    head = LinearMeta(
        name="lm_head", in_features=hidden, out_features=vocab, bias=False, kind="head", layer=None
    )
    weights = sum(linear.in_features * linear.out_features for linear in linears)
    biases = sum(linear.out_features for linear in linears if linear.bias)
    return ModelMeta(
        name=name,
        family="qwen2.5",
        path=Path(name),
        architecture="Qwen2ForCausalLM",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=32768,
        tied_head=tied,
        linears=(*linears, head),
        total_params=weights + biases + vocab * hidden * (1 if tied else 2),
        keep_high=keep_high or {},
    )


def qwen_7b() -> ModelMeta:
    """Qwen2.5-7B: 7.6e9 parameters."""
    return decoder_meta(
        name="Qwen2.5-7B",
        hidden=3584,
        intermediate=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        vocab=152064,
        tied=False,
    )


def qwen_one_and_a_half_b() -> ModelMeta:
    """Qwen2.5-1.5B: a tied head."""
    return decoder_meta(
        hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocab=151936, tied=True
    )


def qwen_half_b() -> ModelMeta:
    """Qwen2.5-0.5B: hidden 896 = 7 x 128, a tied head of 28% of all FLOPs."""
    return decoder_meta(
        name="Qwen2.5-0.5B",
        hidden=896,
        intermediate=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        vocab=151936,
        tied=True,
    )


def resize(meta: ModelMeta, suffix: str, **features: int) -> ModelMeta:
    """The same model with other feature counts where a linear's name ends with `suffix`."""
    return map_linears(meta, suffix, lambda linear: replace(linear, **features))


def map_linears(
    meta: ModelMeta, suffix: str, change: Callable[[LinearMeta], LinearMeta]
) -> ModelMeta:
    """The same model with every linear whose name ends with `suffix` changed."""
    linears = tuple(change(m) if m.name.endswith(suffix) else m for m in meta.linears)
    return replace(meta, linears=linears)


def plan_for(
    hardware: str | Hardware,
    meta: ModelMeta | None = None,
    *,
    precision: dict[str, Any] | None = None,
    **flat: Any,
) -> Plan:
    """Plan a job of default options but for `flat` ones and those of `precision`."""
    config = Config(**flat, precision=precision or {})
    device = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    return build_plan(config, device, meta or qwen_half_b())

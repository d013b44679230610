"""Tiny models and plans for tests, built here so that no file or download is needed."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from swiftfp8.plan import (
    FP8_RECIPES,
    FusionPlan,
    LayerPlan,
    LoraPlan,
    LossPlan,
    MemoryEstimate,
    Plan,
    RecipeOptions,
)


def tiny_llama(
    *,
    hidden: int = 128,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """Llama with grouped-query attention; random weights of the usual spread, seeded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype)


def tiny_qwen2(*, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Qwen2: biases on q, k, v and a tied head."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = Qwen2ForCausalLM(config)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)
    return model.to(dtype)


def plan_for(
    model: PreTrainedModel,
    *,
    recipe: RecipeOptions | None,
    backend: str | None = "emulated",
    tuner: str = "lora",
    rank: int = 8,
    dropout: float = 0.0,
    high: tuple[str, ...] = (),
    targets: tuple[str, ...] | None = None,
    gradient_checkpointing: bool | str = False,
    compute_dtype: str = "fp32",
    fused_loss: bool | None = None,
    head: str = "bf16",
) -> Plan:
    """A plan by hand: all linears but the head in FP8, except those whose name ends in `high`.

    The loss is fused where the backend is `torch`, unless `fused_loss` says otherwise.
    """
    layers = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            continue
        is_head = name == "lm_head"
        lora = tuner == "lora" and not is_head and (targets is None or name in targets)
        kept_high = recipe is None or any(name.endswith(part) for part in high)
        kept_high = kept_high or (is_head and head == "bf16")
        layers.append(
            LayerPlan(
                name=name,
                in_features=module.in_features,
                out_features=module.out_features,
                bias=module.bias is not None,
                precision=compute_dtype if kept_high else recipe.recipe,
                reason="by hand",
                lora=lora,
                trainable=tuner == "full",
            )
        )
    count = model.config.num_hidden_layers
    flops = [layer.in_features * layer.out_features for layer in layers]
    fp8 = [f for f, layer in zip(flops, layers, strict=True) if layer.precision in FP8_RECIPES]
    lora = LoraPlan(
        rank=rank,
        alpha=2.0 * rank,
        dropout=dropout,
        use_rslora=False,
        targets=tuple(layer.name for layer in layers if layer.lora),
    )
    return Plan(
        model_name="tiny",
        hardware_name="test",
        device="cpu",
        asked_dtype="fp8",
        compute_dtype=compute_dtype,
        recipe=recipe,
        backend=backend,
        layers=tuple(layers),
        lora=lora if tuner == "lora" else None,
        tuner=tuner,
        gradient_checkpointing={True: "full", False: "none"}.get(
            gradient_checkpointing, gradient_checkpointing
        ),
        fusion=FusionPlan(
            layers=count if backend == "torch" and tuner == "lora" else 0, total=count, reason=None
        ),
        loss_scaler=False,
        loss=LossPlan(fused=backend == "torch" if fused_loss is None else fused_loss, reason=""),
        start_step=0,
        fp8_token_multiple=16,
        min_coverage=0.0,
        coverage=sum(fp8) / sum(flops),
        memory=MemoryEstimate(
            weights=0,
            transposes=0,
            adapters=0,
            optimizer=0,
            gradients=0,
            activations=0,
            logits=0,
            workspace=0,
            available=0,
            largest_micro_batch=1,
        ),
    )


def batch(
    *, rows: int = 2, length: int = 32, vocab: int = 256, seed: int = 1
) -> dict[str, torch.Tensor]:
    """Seeded token ids with themselves as labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def rule_batch(*, seed: int, rows: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    """Sequences that can be learned: the next token is 5t + 3 mod 64, but one in ten is random."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 64, (rows, 1), generator=generator)]
    for _ in range(length - 1):
        random = torch.randint(0, 64, (rows, 1), generator=generator)
        noisy = torch.rand(rows, 1, generator=generator) < 0.1
        tokens.append(torch.where(noisy, random, (tokens[-1] * 5 + 3) % 64))
    ids = torch.cat(tokens, dim=1)
    return {"input_ids": ids, "labels": ids}

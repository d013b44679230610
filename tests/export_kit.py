"""Tiny random models on disk, for tests of the export."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

FAMILIES = ("llama", "llama_tied", "qwen2", "qwen3", "gemma3")
_COMMON = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}


def tiny_model(family: str, **changes: object) -> PreTrainedModel:
    """A seeded random model in BF16; projections of 256 x 256, 128 x 256 and 384 x 256."""
    torch.manual_seed(0)
    options = {**_COMMON, **changes}
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**options, tie_word_embeddings=False))
    elif family == "llama_tied":
        model = LlamaForCausalLM(LlamaConfig(**options, tie_word_embeddings=True))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**options, tie_word_embeddings=True))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    elif family == "qwen3":
        untied = {"tie_word_embeddings": False}
        model = Qwen3ForCausalLM(Qwen3Config(**{**untied, **options}))
    elif family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        config = Qwen3MoeConfig(**{**experts, "tie_word_embeddings": False, **options})
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**options))
    return model.to(torch.bfloat16)


def save_model(directory: Path, family: str = "llama", **changes: object) -> Path:
    """Write `tiny_model` as a Hugging Face directory."""
    tiny_model(family, **changes).save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path) -> Path:
    """Add a tokenizer of whole words, with ids under the tiny models' vocabulary of 300."""
    words = ["[UNK]", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(
        directory
    )
    return directory

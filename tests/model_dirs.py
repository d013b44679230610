"""Tiny random checkpoints of the supported architectures, written as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma3_text": Gemma3TextConfig,
}


def write_model(
    folder: Path, architecture: str = "qwen3", *, tokenizer: bool = True, **changes: object
) -> Path:
    """A seeded random model of `architecture` in float32, with a word-level tokenizer."""
    shard = changes.pop("max_shard_size", "1GB")
    config = CONFIGS[architecture](**{**SHAPE, "tie_word_embeddings": False, **changes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=shard)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path, **special: str) -> None:
    """A tokenizer of a dozen words in `folder`, with an end token and whatever `special` names."""
    words = ["<unk>", "<s>", "</s>", *special.values(), "hello", "world", "the", "capital", "."]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **special
    ).save_pretrained(folder)


def edit_json(file: Path, **changes: object) -> None:
    """Set keys of a JSON file."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))

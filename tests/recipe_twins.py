"""A tiny twin of every packaged recipe: the same options on a random model and a few rows.

The model is of the recipe's architecture, the rows have the columns of its data set on the hub, so
that a recipe which its own data or model would break breaks here.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from task_kit import write_encoder, write_rows
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from swiftfp8.config.paths import assets_dir
from swiftfp8.config.schema import Config

# By the beginning of a recipe's `model`; whether the head is tied is the real one's.
MODELS: dict[str, tuple[type, bool]] = {
    "Qwen/Qwen2.5-0.5B": (Qwen2Config, True),
    "Qwen/Qwen2.5-1.5B": (Qwen2Config, True),
    "Qwen/Qwen2.5-7B": (Qwen2Config, False),
    "Qwen/Qwen3-8B": (Qwen3Config, False),
    "meta-llama/Llama-3.1-8B": (LlamaConfig, False),
    "mistralai/Mistral-7B": (MistralConfig, False),
    "google/gemma-3-1b": (Gemma3TextConfig, True),
}
ENCODERS = ("sentence-transformers/all-MiniLM-L6-v2",)
ROWS = 64
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ANIMALS = ("cat", "dog", "cow", "bee", "horse", "duck")


def write_twin(folder: Path, config: Config) -> list[str]:
    """The overrides that turn a recipe, of which `config` came, into its twin in `folder`."""
    overrides = [
        f"output_dir={folder}",
        "run_name=twin",
        "max_steps=3",
        f"max_length={min(config.max_length, 128)}",
        "precision.backend=emulated",
        "train.logging_steps=1",
        "train.images=false",
    ]
    if config.model is not None:
        overrides.append(f"model={_write_model(folder / 'model', config.model)}")
    if config.dataset[0] in DATASETS:
        rows = [DATASETS[config.dataset[0]](random.Random(k)) for k in range(ROWS)]
        overrides.append(f"dataset={write_rows(folder / 'rows.jsonl', rows)}")
        overrides.append("split_dataset_ratio=0.1")  # a hundredth of so few rows would be none
    return overrides


def _write_model(folder: Path, name: str) -> Path:
    if name in ENCODERS:
        return write_encoder(folder)
    found = [made for start, made in MODELS.items() if name.startswith(start)]
    assert found, f"no tiny twin of {name}: add its architecture to MODELS"
    config_class, tied = found[0]
    own = AutoConfig.from_pretrained(assets_dir() / "tiny")
    config = config_class(  # every linear fits FP8 blocks of 128 x 128
        vocab_size=own.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in _TOKENIZER:
        shutil.copy(assets_dir() / "tiny" / file, folder / file)
    return folder


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _words(draw: random.Random) -> tuple[str, str]:
    animal = draw.choice(_ANIMALS)
    return f"What does a {animal} say, {draw.randint(1, 99)} times?", f"A {animal} says hello."


def _alpaca(draw: random.Random) -> dict[str, Any]:
    question, answer = _words(draw)
    more = draw.choice(["", "Think first."])
    return {"instruction": question, "input": more, "output": answer, "text": f"{question} ..."}


def _binarized(draw: random.Random) -> dict[str, Any]:
    question, answer = _words(draw)
    sides = {"chosen": _turns(question, answer), "rejected": _turns(question, answer.upper())}
    return {**sides, "score_chosen": 8.0, "score_rejected": 3.0}


def _kto(draw: random.Random) -> dict[str, Any]:
    question, answer = _words(draw)
    prompt, completion = _turns(question, answer)
    return {"prompt": [prompt], "completion": [completion], "label": draw.random() < 0.5}


def _questions(draw: random.Random) -> dict[str, Any]:
    return dict(zip(("query", "answer"), _words(draw), strict=True))


def _stories(draw: random.Random) -> dict[str, Any]:
    return {"text": " ".join(" ".join(_words(draw)) for _ in range(draw.randint(1, 6)))}


def _long(draw: random.Random) -> dict[str, Any]:
    question, answer = _words(draw)
    return {"id": "1", "messages": _turns(question * 9, answer), "length": 9}


def _thoughts(draw: random.Random) -> dict[str, Any]:
    question, answer = _words(draw)
    thought = draw.choice(["<think>\n\n</think>\n\n", "<think>\nHm.\n</think>\n\n"])
    turns = [{"from": "user", "value": question}, {"from": "assistant", "value": thought + answer}]
    return {"system": "Think.", "conversations": turns}


def _news(draw: random.Random) -> dict[str, Any]:
    label = draw.randrange(5)
    return {"text": f"{_ANIMALS[label]} news", "label": label, "label_text": _ANIMALS[label]}


DATASETS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "tatsu-lab/alpaca": _alpaca,
    "trl-lib/ultrafeedback_binarized": _binarized,
    "trl-lib/kto-mix-14k": _kto,
    "sentence-transformers/natural-questions": _questions,
    "roneneldan/TinyStories": _stories,
    "THUDM/LongAlign-10k": _long,
    "open-thoughts/OpenThoughts-114k": _thoughts,
    "SetFit/bbc-news": _news,
}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))

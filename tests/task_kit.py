"""Tiny models and rows for every task, and a run of one in this process."""

from __future__ import annotations

import io
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, BertConfig, BertModel, Qwen3Config, Qwen3ForCausalLM

from swiftfp8 import pipeline
from swiftfp8.config.compose import compose_arguments
from swiftfp8.config.paths import assets_dir
from swiftfp8.train.metrics import read_log
from swiftfp8.train.trainer import TrainResult

TOPICS = {"animal": ["cat", "dog", "horse"], "food": ["bread", "cheese", "rice"]}
SOUNDS = {"cat": "meow", "dog": "bark", "cow": "moo", "bell": "ring", "wind": "howl", "bee": "hum"}
PLAIN = {"fp32": {"dtype": "fp32"}, "bf16": {"dtype": "bf16"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    **PLAIN,
    "fp8": {"dtype": "fp8", "precision": {"emulate": True, "recipe": "fp8_current"}},
}


def write_decoder(folder: Path, hidden: int = 64) -> Path:
    """A random Qwen3 of two narrow layers with the embedded model's tokenizer and template."""
    tiny = assets_dir() / "tiny"
    own = AutoConfig.from_pretrained(tiny)
    config = Qwen3Config(
        vocab_size=own.vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=256,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return _with_tokenizer(folder)


def write_encoder(folder: Path, hidden: int = 64) -> Path:
    """A random BERT without a head, as sentence encoders are stored."""
    vocabulary = AutoConfig.from_pretrained(assets_dir() / "tiny").vocab_size
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        initializer_range=0.2,  # else the first token's vector hardly depends on the text
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return _with_tokenizer(folder)


def _with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(assets_dir() / "tiny" / name, folder / name)
    return folder


def rows_of(kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows that a tiny model can learn from in a few dozen steps."""
    draw = random.Random(seed)
    made: list[dict[str, Any]] = []
    for _ in range(count):
        topic = draw.choice(list(TOPICS))
        text = f"{draw.choice(TOPICS[topic])} we {draw.choice(['see', 'take', 'find'])} now"
        word = draw.choice(list(SOUNDS))
        made.append(
            {
                "label": {"text": text, "label": topic},
                "several": {"text": text, "label": [topic, "now"] if count % 2 else [topic]},
                "number": {"text": text, "label": 1.5 if topic == "food" else -0.5},
                "preference": {"prompt": text, "chosen": "yes yes", "rejected": "never"},
                "kto": {
                    "prompt": text,
                    "completion": "yes yes" if topic == "food" else "never",
                    "label": topic == "food",
                },
                "embedding": {"anchor": word, "positive": SOUNDS[word]},
            }[kind]
        )
    return made


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task on a tiny model: rows, options, and a metric with the side on which it is better."""

    rows: str
    options: dict[str, Any]
    metric: str
    higher: bool = True
    model: str = "decoder"


CASES = {
    "seq_cls": Case(rows="label", options={"task": "seq_cls"}, metric="eval_loss", higher=False),
    "seq_cls-encoder": Case(
        rows="label",
        options={"task": "seq_cls"},
        metric="eval_loss",
        higher=False,
        model="encoder",
    ),
    "dpo": Case(rows="preference", options={"task": "dpo"}, metric="eval_rewards/margins"),
    "kto": Case(
        rows="kto",
        options={"task": "dpo", "rlhf": {"loss_type": "kto"}},
        metric="eval_rewards/margins",
    ),
    "reward": Case(rows="preference", options={"task": "reward"}, metric="eval_rewards/margins"),
    "embedding": Case(
        rows="embedding", options={"task": "embedding"}, metric="eval_loss", higher=False
    ),
}


def run_task(
    folder: Path, model: Path, rows: str, name: str = "run", **options: Any
) -> tuple[TrainResult, str]:
    """Train in this process into `folder/name`; returns the result and what was shown."""
    data = folder / f"{rows}.jsonl"
    held = folder / f"{rows}-held.jsonl"
    if not data.exists():
        write_rows(data, rows_of(rows, 32))
        write_rows(held, rows_of(rows, 8, seed=1))
    arguments = {
        "model": str(model),
        "dataset": str(data),
        "val_dataset": str(held),
        "output_dir": str(folder),
        "run_name": name,
        "max_length": 64,
        "max_steps": 9,
        "learning_rate": 0.01,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        **options,
        "train": {
            "logging_steps": 2,
            "eval_steps": 3,
            "save_steps": 3,
            "save_total_limit": 9,
            "images": False,
            **options.get("train", {}),
        },
    }
    shown = io.StringIO()
    composed = compose_arguments(None, arguments)
    result = pipeline.train(composed, console=Console(file=shown, width=200))
    return result, shown.getvalue()


def evaluations(run_dir: Path, metric: str) -> list[float]:
    """A metric of every evaluation, in order."""
    return [line[metric] for line in read_log(run_dir) if metric in line]

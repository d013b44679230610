#!/usr/bin/env python3
"""Does FP8 learn what BF16 learns? The same fine-tunes by `swiftfp8 train`, their evaluation loss.

    python scripts/bench/bench_quality.py                        # 300 steps, 3 seeds, on a GPU
    python scripts/bench/bench_quality.py --small --engines bf16,emulated --steps 40 --seeds 1

A small Llama is trained from nothing, in BF16, on one artificial language and exported; LoRA then
teaches it a second one that shares half of its grammar with the first. A language is a Markov chain
over words: its entropy is known, so that the table shows how much there was to learn. Runs differ
in precision and seed only (rows' order, adapters); all of them go on at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

WORDS, FOLLOWERS, ROW = 512, 16, 256
ENGINES = {
    "bf16": ["dtype=bf16"],
    "torch": ["dtype=fp8", "precision.backend=torch"],
    "torch_fp8_head": ["dtype=fp8", "precision.backend=torch", "precision.head=fp8"],
    "te": ["dtype=fp8", "precision.backend=te"],
    "emulated": ["dtype=fp8", "precision.backend=emulated", "precision.emulate=true"],
}


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_languages(folder, args)
        write_model(folder / "blank", args)
        base = train(folder, "base", args.base_steps, 0, [
            f"model={folder / 'blank'}", f"dataset={folder / 'first.jsonl'}", "tuner=full",
            "dtype=bf16", "learning_rate=1e-3", f"export_dir={folder / 'base'}",
            "export_quantization_bit=16", "export.verify=false",
        ])  # fmt: skip
        print(f"base: evaluation loss {base:.4f} in the second language", flush=True)
        jobs = [(engine, seed) for seed in range(1, args.seeds + 1) for engine in args.engines]
        with ThreadPoolExecutor(args.jobs) as pool:
            losses = dict(
                zip(jobs, pool.map(lambda job: tune(folder, *job, args), jobs), strict=True)
            )
        report(losses, base, entropy(second_language()), args)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=lambda text: text.split(","), default=["bf16", "torch"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=9, help="runs at the same time")
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--out", help="write results as JSON")
    args = parser.parse_args()
    unknown = set(args.engines) - set(ENGINES)
    if unknown:
        parser.error(
            f"unknown engines: {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}"
        )
    return args


def tune(folder: Path, engine: str, seed: int, args: argparse.Namespace) -> float:
    """Evaluation loss after LoRA in the second language."""
    return train(folder, f"{engine}-{seed}", args.steps, seed, [
        f"model={folder / 'base'}", f"dataset={folder / 'second.jsonl'}", "lora_rank=16",
        "lora_alpha=32", "learning_rate=1e-3", *ENGINES[engine],
    ])  # fmt: skip


def train(folder: Path, name: str, steps: int, seed: int, options: list[str]) -> float:
    """One run of `swiftfp8 train`; returns its last evaluation loss."""
    command = [
        sys.executable, "-m", "swiftfp8", "train", *options, f"max_steps={steps}", f"seed={seed}",
        f"output_dir={folder / 'runs'}", f"run_name={name}", "task=pretrain", f"max_length={ROW}",
        f"val_dataset={folder / 'held-out.jsonl'}", "per_device_train_batch_size=16",
        "per_device_eval_batch_size=16", "train.eval_steps=0", "train.save_steps=0",
        "train.images=false",
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    result = json.loads((folder / "runs" / name / "result.json").read_text())
    return float(result["eval_loss"])


def write_languages(folder: Path, args: argparse.Namespace) -> None:
    rows = 400 if args.small else 16 * max(args.steps, args.base_steps)
    for name, language, count, seed in (
        ("first", first_language(), rows, 1),
        ("second", second_language(), rows, 2),
        ("held-out", second_language(), 16 if args.small else 256, 3),
    ):
        with (folder / f"{name}.jsonl").open("w") as file:
            for text in sample(language, count, seed):
                file.write(json.dumps({"text": text}) + "\n")


Language = tuple[np.ndarray, np.ndarray]  # which words may follow each word, and how likely


def first_language(seed: int = 0) -> Language:
    rng = np.random.default_rng(seed)
    followers = np.stack([rng.choice(WORDS, FOLLOWERS, replace=False) for _ in range(WORDS)])
    chances = rng.dirichlet(np.full(FOLLOWERS, 0.7), WORDS)
    return followers, chances


def second_language() -> Language:
    """Half of the words keep what may follow them."""
    (followers, chances), (other, other_chances) = first_language(), first_language(1)
    half = WORDS // 2
    return (
        np.concatenate([followers[:half], other[half:]]),
        np.concatenate([chances[:half], other_chances[half:]]),
    )


def sample(language: Language, rows: int, seed: int) -> Iterator[str]:
    followers, chances = language
    rng = np.random.default_rng(seed)
    edges = chances.cumsum(1)
    word = rng.integers(WORDS, size=rows)
    words = [word]
    for _ in range(ROW - 3):
        choice = (rng.random(rows)[:, None] > edges[word]).sum(1).clip(max=FOLLOWERS - 1)
        word = followers[word, choice]
        words.append(word)
    for row in np.stack(words, 1):
        yield " ".join(f"w{w}" for w in row)


def entropy(language: Language) -> float:
    """Nats a word, under the chain's stationary distribution: no model's loss can be below."""
    followers, chances = language
    share = np.full(WORDS, 1 / WORDS)
    for _ in range(200):
        following = np.zeros(WORDS)
        np.add.at(following, followers.ravel(), (share[:, None] * chances).ravel())
        share = following
    return float(-(share[:, None] * chances * np.log(np.maximum(chances, 1e-300))).sum())


def write_model(folder: Path, args: argparse.Namespace) -> None:
    """A blank Llama whose tokenizer knows the words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    vocabulary |= {f"w{i}": i + 4 for i in range(WORDS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    torch.manual_seed(0)
    hidden, layers = (128, 2) if args.small else (1024, 8)
    config = LlamaConfig(
        vocab_size=640, hidden_size=hidden, intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256), max_position_embeddings=512,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def report(
    losses: dict[tuple[str, int], float], base: float, floor: float, args: argparse.Namespace
) -> None:
    print(f"evaluation loss after {args.steps} steps (before {base:.3f}, the language's entropy "
          f"{floor:.3f}), by seed, mean, against BF16")  # fmt: skip
    means: dict[str, Any] = {}
    for engine in args.engines:
        row = [losses[engine, seed] for seed in range(1, args.seeds + 1)]
        means[engine] = float(np.mean(row))
        first = means[args.engines[0]]
        print(f"{engine:16s} {'  '.join(f'{loss:.4f}' for loss in row)}  {means[engine]:.4f}  "
              f"{means[engine] / first - 1:+.2%}", flush=True)  # fmt: skip
    if args.out:
        table = {f"{engine}-{seed}": loss for (engine, seed), loss in losses.items()}
        Path(args.out).write_text(json.dumps({"losses": table, "base": base, "entropy": floor}))


if __name__ == "__main__":
    sys.exit(main())

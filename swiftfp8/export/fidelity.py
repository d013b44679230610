"""How close an export keeps to its BF16 merge, in three figures; and the text they are taken on.

For every position of held-out text, p from the merged model, q from the export:
    perplexity ratio = exp(mean(d)), d = -log q(next) + log p(next); its standard error by d's
    token KL         = mean(sum_v p(v) (log p(v) - log q(v)))
    top-1 agreement  = share of positions where both prefer the same token
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.quiet import quiet_transformers

WINDOW = 512
_SUFFIXES = (".txt", ".md", ".jsonl", ".json")


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """The export against its BF16 merge over `tokens` predictions of `text`."""

    text: str
    tokens: int
    perplexity_merged: float
    perplexity_export: float
    perplexity_ratio: float
    token_kl: float
    top1_agreement: float
    ratio_error: float = 0.0


def existing_texts(names: Sequence[str]) -> list[Path]:
    """The files of `export.fidelity_dataset`; SwiftFP8Error where one can't be read as text."""
    files = [Path(name) for name in names]
    for file in files:
        if not file.is_file():
            raise SwiftFP8Error("no such file", where=f"export.fidelity_dataset: {file}")
    if files and not read_texts(files):
        raise SwiftFP8Error(
            "there is no text to compare on",
            where=f"export.fidelity_dataset: {', '.join(map(str, files))}",
            fix="give files with text, or rows with text or messages",
        )
    return files


def read_texts(files: Sequence[Path]) -> list[str]:
    """Texts of .txt and .md files, and of JSON or JSONL rows (strings, `text`, `messages`, ...)."""
    texts: list[str] = []
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise SwiftFP8Error(
                f"fidelity text can't be read from '{file.suffix or file.name}'",
                where=f"export.fidelity_dataset: {file}",
                fix=f"give {', '.join(_SUFFIXES)} files",
            )
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SwiftFP8Error(
                f"can't read it: {error}", where=f"export.fidelity_dataset: {file}"
            ) from error
        found = list(_row_texts(file, content)) if "json" in file.suffix else [content]
        try:
            "".join(found).encode()
        except UnicodeEncodeError as error:  # JSON can name half of a character
            raise SwiftFP8Error(
                f"its text is no Unicode: {error.reason}",
                where=f"export.fidelity_dataset: {file}",
                fix="remove the lone surrogates (\\ud800 to \\udfff)",
            ) from error
        texts += found
    return [text for text in texts if text.strip()]


def text_windows(
    texts: Sequence[str], tokens: int, tokenizer_dir: Path, *, trust_remote_code: bool = False
) -> Tensor:
    """Token ids [B, T] of the texts joined, T <= 512, each window opened by BOS if there is one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_dir, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise SwiftFP8Error(
            "export.fidelity_dataset needs a tokenizer, and none can be loaded",
            where=str(tokenizer_dir),
        ) from error
    with quiet_transformers():  # a text longer than the model's context is cut below
        ids = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"][:tokens]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = min(WINDOW - len(bos), len(ids))
    if length < 2:
        raise SwiftFP8Error("there is no text to compare on", where="export.fidelity_dataset")
    count = len(ids) // length
    return torch.tensor([bos + ids[n * length : (n + 1) * length] for n in range(count)])


def compare_logits(merged_TV: Tensor, export_TV: Tensor, window_T: Tensor) -> Tensor:
    """Sums over the predicted positions: -log p, -log q, their squared difference, KL(p || q),
    agreement.
    """
    sums = torch.zeros(5, dtype=torch.float64)
    targets = window_T[1:].to(export_TV.device)
    for start in range(0, len(targets), 64):
        part = slice(start, min(start + 64, len(targets)))
        log_p = merged_TV[part].float().log_softmax(-1)
        log_q = export_TV[part].float().log_softmax(-1)
        wanted = targets[part][:, None]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        same = log_p.argmax(-1) == log_q.argmax(-1)
        log_p_next, log_q_next = log_p.gather(1, wanted), log_q.gather(1, wanted)
        sums += torch.stack(
            [
                -log_p_next.sum(dtype=torch.float64),
                -log_q_next.sum(dtype=torch.float64),
                (log_p_next - log_q_next).square().sum(dtype=torch.float64),
                kl.sum(dtype=torch.float64),
                same.sum(dtype=torch.float64),
            ]
        ).cpu()
    return sums


def summarize(sums: Tensor, count: int, text: str = "") -> Fidelity:
    """The figures of `count` predictions from their sums (`compare_logits`)."""
    nll_merged, nll_export, squared, kl, same = (sums / count).tolist()
    change = nll_export - nll_merged
    variance = max(squared - change**2, 0.0)
    return Fidelity(
        text=text,
        tokens=count,
        perplexity_merged=math.exp(nll_merged),
        perplexity_export=math.exp(nll_export),
        perplexity_ratio=math.exp(change),
        ratio_error=math.exp(change) * math.sqrt(variance / count),
        token_kl=kl,
        top1_agreement=same,
    )


def _row_texts(file: Path, content: str) -> Iterator[str]:
    lines = content.splitlines() if file.suffix == ".jsonl" else [content]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SwiftFP8Error(f"not JSON: {error}", where=f"{file}:{number}") from error
        for row in value if isinstance(value, list) else [value]:
            yield "\n".join(_strings(row))


def _strings(value: Any) -> Iterator[str]:
    """The texts of a row: what its keys name, a conversation turn by turn."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        turns = ("messages", "conversations", "text", "system", "instruction", "input", "output")
        for key in (*turns, "content", "value", "query", "response", "question", "answer"):
            if key in value:
                yield from _strings(value[key])

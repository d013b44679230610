"""How close the export keeps to its BF16 merge on real text.

For every position of held-out text, p from the merged model, q from the export:
    perplexity ratio = exp(mean(-log q(next)) - mean(-log p(next)))
    token KL         = mean(sum_v p(v) (log p(v) - log q(v)))
    top-1 agreement  = share of positions where both prefer the same token
The two models are loaded one after the other; the first one's logits wait in a temporary file.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.layout import ExportFormat, Layout
from swiftfp8.export.source import Source, build_model
from swiftfp8.export.staging import check_space
from swiftfp8.models.quiet import quiet_transformers

_WINDOW = 512
_SUFFIXES = (".txt", ".md", ".jsonl", ".json")


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """The export against its BF16 merge over `tokens` predictions."""

    tokens: int
    perplexity_merged: float
    perplexity_export: float
    perplexity_ratio: float
    token_kl: float
    top1_agreement: float


def measure_fidelity(
    source: Source,
    layout: Layout,
    export_format: ExportFormat,
    *,
    files: Sequence[Path],
    tokens: int,
    tokenizer_dir: Path,
    device: str = "cpu",
) -> Fidelity:
    """Run both models over `tokens` tokens of `files`: float32 on a CPU, BF16 on a GPU.

    Raises:
        SwiftFP8Error: a file that can't be read or holds too little text, no tokenizer.
    """
    windows_BT = text_windows(
        read_texts(files), tokens, tokenizer_dir, trust_remote_code=source.trust_remote_code
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    vocab = int(source.layers.config.get("vocab_size", 1 << 18))
    positions = windows_BT.numel()
    with tempfile.TemporaryDirectory(prefix="swiftfp8-fidelity-") as folder:
        check_space(Path(folder), positions * vocab * dtype.itemsize)
        merged = ((name, source.merged(name)) for name in source.tensors)
        model = build_model(source, merged, dtype=dtype, device=device)
        stored = [
            _keep(logits, Path(folder) / f"{row}.bin")
            for row, logits in enumerate(_window_logits(model, windows_BT))
        ]
        del model
        reference = export_format.reference(source, layout)
        model = build_model(source, reference, dtype=dtype, device=device)
        sums = torch.zeros(4, dtype=torch.float64)
        for row, logits_TV in enumerate(_window_logits(model, windows_BT)):
            sums += _compare(stored[row].to(logits_TV.device), logits_TV, windows_BT[row])
    return _summary(sums, positions - windows_BT.shape[0])


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
        texts += list(_row_texts(file, content)) if "json" in file.suffix else [content]
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
    length = min(_WINDOW - len(bos), len(ids))
    if length < 2:
        raise SwiftFP8Error("there is no text to compare on", where="export.fidelity_dataset")
    count = len(ids) // length
    return torch.tensor([bos + ids[n * length : (n + 1) * length] for n in range(count)])


def _window_logits(model: Any, windows_BT: Tensor) -> Iterator[Tensor]:
    with torch.inference_mode():
        for window_T in windows_BT:
            yield model(input_ids=window_T[None].to(model.device), use_cache=False).logits[0]


def _keep(logits_TV: Tensor, file: Path) -> Tensor:
    """Move logits to a file-backed tensor, so that they cost no memory for long."""
    kept = torch.from_file(
        str(file), shared=True, size=logits_TV.numel(), dtype=logits_TV.dtype
    ).view(logits_TV.shape)
    return kept.copy_(logits_TV)


def _compare(merged_TV: Tensor, export_TV: Tensor, window_T: Tensor) -> Tensor:
    """Sums over the predicted positions: -log p, -log q, KL(p || q), agreement."""
    sums = torch.zeros(4, dtype=torch.float64)
    targets = window_T[1:].to(export_TV.device)
    for start in range(0, len(targets), 64):
        part = slice(start, min(start + 64, len(targets)))
        log_p = merged_TV[part].float().log_softmax(-1)
        log_q = export_TV[part].float().log_softmax(-1)
        wanted = targets[part][:, None]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        same = log_p.argmax(-1) == log_q.argmax(-1)
        sums += torch.stack(
            [
                -log_p.gather(1, wanted).sum(dtype=torch.float64),
                -log_q.gather(1, wanted).sum(dtype=torch.float64),
                kl.sum(dtype=torch.float64),
                same.sum(dtype=torch.float64),
            ]
        ).cpu()
    return sums


def _summary(sums: Tensor, count: int) -> Fidelity:
    nll_merged, nll_export, kl, same = (sums / count).tolist()
    return Fidelity(
        tokens=count,
        perplexity_merged=math.exp(nll_merged),
        perplexity_export=math.exp(nll_export),
        perplexity_ratio=math.exp(nll_export - nll_merged),
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
        except ValueError as error:
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

"""Entries of the configuration to tokenized rows, their collator, and a report."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from swiftfp8.data.cache import token_cache
from swiftfp8.data.collator import Collator
from swiftfp8.data.mixing import check_shares, mix
from swiftfp8.data.overlap import count_known
from swiftfp8.data.packing import PackCollator, PackedRows, pack_rows
from swiftfp8.data.parts import settle_bad, tokenize_part, tokenize_settings, tokenize_task_part
from swiftfp8.data.reading import Converted, read_examples
from swiftfp8.data.report import DataReport, PartReport, known_rows_warning
from swiftfp8.data.sources import entry_files
from swiftfp8.data.streaming import open_stream, read_head
from swiftfp8.data.task_rows import (
    LabelCollator,
    Padding,
    PairCollator,
    RatedCollator,
    RelatedCollator,
    RelatedRows,
    TaskRows,
)
from swiftfp8.data.token_rows import TokenRows
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.tasks import TASKS, Head, rates_answers

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config


Rows = TokenRows | PackedRows | TaskRows | RelatedRows
Collate = Callable[[Sequence[Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Rows, or packs of rows, to train and evaluate on; `train` may be a `Stream` instead."""

    train: Any
    eval: Rows | None
    collator: Collate
    report: DataReport


def load_datasets(
    config: Config,
    tokenizer: Any,
    token_multiple: int,
    *,
    head: Head | None = None,
    pooling: str | None = None,
    whole: bool = False,
) -> Datasets:
    """Read, check, convert and tokenize `dataset` and `val_dataset`.

    Args:
        config: `dataset val_dataset split_dataset_ratio task max_length packing system seed hub
            attn_implementation data.*`.
        tokenizer: a fast Hugging Face tokenizer.
        token_multiple: sequences are padded to a multiple of this (FP8 asks for 8, 16 or 128).
        head: what labels mean (`task=seq_cls`).
        pooling: which tokens make a vector (`task=embedding`).
        whole: rows are wanted in memory: of `data.streaming` the first few thousand.

    Raises:
        SwiftFP8Error: what read_entry and tokenize_rows raise; bad rows where they aren't
            skipped; no row left.
    """
    check_shares(config)
    if config.data.streaming and not whole:
        return _stream(config, tokenizer, token_multiple)
    cached = None
    if TASKS[config.task].packs:
        parts, cached = _language_rows(config, tokenizer)
    else:
        tokenize = partial(tokenize_task_part, head=head, pooling=pooling)
        parts = _tokenized(config, tokenizer, tokenize)
    train_rows, train_report = parts["train"]
    eval_rows, eval_report = parts.get("eval", (None, None))
    return Datasets(
        train=train_rows,
        eval=eval_rows,
        collator=_collator(config, tokenizer, token_multiple),
        report=DataReport(
            train=train_report, eval=eval_report, eval_from=_eval_from(config), cached=cached
        ),
    )


def _stream(config: Config, tokenizer: Any, token_multiple: int) -> Datasets:
    """Rows that are read while the run trains; the first of them are tokenized now, as a check."""
    from swiftfp8.data.stream import StreamCollator

    settings = tokenize_settings(config)
    stream, first, held, report = open_stream(config, tokenizer, settings)
    settle_bad(first.bad, first.total, config)
    tokenize_part(first, tokenizer, config, "dataset")
    if config.val_dataset:
        held = _convert(config.val_dataset, config, "val_dataset")
    eval_rows, eval_report = None, None
    if held is not None:
        settle_bad(held.bad, held.total, config)
        eval_rows, eval_report = tokenize_part(held, tokenizer, config, _eval_from(config) or "")
        if config.packing:
            eval_rows, eval_report = _packed(eval_rows, eval_report, config, "eval")
    return Datasets(
        train=stream,
        eval=eval_rows,
        collator=StreamCollator(inner=_collator(config, tokenizer, token_multiple)),
        report=DataReport(train=report, eval=eval_report, eval_from=_eval_from(config)),
    )


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """What was found, in lines to print; `train_rows` None where the rows tell no number yet."""

    lines: list[str]
    train_rows: int | None


def check_rows(config: Config) -> CheckedRows:
    """Read and check the rows that lie on this disk.

    Raises what `load_datasets` raises before it tokenizes: bad rows with file and line.
    """
    check_shares(config)
    lines: list[str] = []
    train_rows = None
    read: dict[str, Converted] = {}
    for key, entries in (("dataset", config.dataset), ("val_dataset", config.val_dataset)):
        streamed = config.data.streaming and key == "dataset"
        here = [entry for entry in entries if streamed or entry_files(entry) is not None]
        if here:
            rows = read[key] = _convert(here, config, key)
            of = f"the first {rows.total:,}" if streamed else f"{rows.total:,}"
            lines.append(f"{key}: {len(rows.examples):,} rows can be used, of {of}")
            lines += [source.line() for source in rows.sources]
            if key == "dataset" and not streamed and len(here) == len(entries):
                train_rows = _rows_alike(len(rows.examples), config)
        lines += [f"{key}: '{e}' lies on a hub, it was not read" for e in entries if e not in here]
    entries = [*config.dataset, *config.val_dataset]
    if not config.data.streaming and all(entry_files(entry) is not None for entry in entries):
        train, held = _parts(read["dataset"], read.get("val_dataset"), config)
        known = count_known(held.examples, train.examples) if held else 0
        lines += [known_rows_warning(known)] if known else []
    lines.append("not tokenized: swiftfp8 data inspect shows lengths and what is trained")
    return CheckedRows(lines=lines, train_rows=train_rows)


def _rows_alike(examples: int, config: Config) -> int | None:
    """Rows that are trained on, where each example becomes one, or none by its length."""
    data = config.data
    several = config.packing or config.task == "pretrain" or data.truncation == "split"
    if several or data.interleave_prob:
        return None
    held = 0 if config.val_dataset else _held_out(examples, config.split_dataset_ratio)
    return examples - held


def _tokenized(
    config: Config, tokenizer: Any, tokenize: Callable[..., tuple[Any, PartReport]]
) -> dict[str, tuple[Any, PartReport]]:
    """Rows and report of each part."""
    train = _convert(config.dataset, config, "dataset")
    named = _convert(config.val_dataset, config, "val_dataset") if config.val_dataset else None
    train, held = _parts(train, named, config)
    known = count_known(held.examples, train.examples) if held else 0
    mixed: dict[str, int] = {}
    if config.data.interleave_prob:
        train, mixed = _mixed(train, config)
    rows, report = tokenize(train, tokenizer, config, "dataset")
    parts = {"train": (rows, replace(report, mixed=mixed, stop=config.data.stopping_strategy))}
    if held is not None:
        rows, report = tokenize(held, tokenizer, config, _eval_from(config) or "")
        parts["eval"] = (rows, replace(report, known=known))
    return parts


def _mixed(rows: Converted, config: Config) -> tuple[Converted, dict[str, int]]:
    """Training rows by the entries' shares, and how many each entry gave."""
    data, entries = config.data, config.dataset
    mixed = mix(rows.examples, entries, data.interleave_prob, data.stopping_strategy, config.seed)
    given = Counter(example.entry for example in mixed)
    return replace(rows, examples=mixed), {e: given[k] for k, e in enumerate(entries)}


def _eval_from(config: Config) -> str | None:
    if config.val_dataset:
        return "val_dataset"
    if config.data.eval_rows:
        return f"the first {config.data.eval_rows:,} rows of dataset"
    ratio = config.split_dataset_ratio
    return f"{ratio:g} of dataset" if ratio > 0 else None


def _language_rows(
    config: Config, tokenizer: Any
) -> tuple[dict[str, tuple[Any, PartReport]], str | None]:
    """`_tokenized` for language modelling, packed where asked; and what the cache did for it."""
    note = None
    cache = token_cache(config, tokenizer)
    kept = None if cache is None else cache.read()
    if cache is not None and kept is not None:
        note = f"tokens taken from {cache.path} (data.cache=true)"
        made = {
            name: (TokenRows(part.ids, part.labels, part.lengths, part.weights), part.report)
            for name, part in kept.items()
        }
    else:
        made = _tokenized(config, tokenizer, tokenize_part)
        parts = {name: rows.keep(report) for name, (rows, report) in made.items()}
        if cache is not None and cache.write(parts):
            note = f"tokens kept in {cache.path} (data.cache=true)"
    if config.packing:
        made = {name: _packed(rows, report, config, name) for name, (rows, report) in made.items()}
    return made, note


def _packed(
    rows: TokenRows, report: PartReport, config: Config, name: str
) -> tuple[PackedRows, PartReport]:
    shuffle = config.data.shuffle and name == "train"
    packs = pack_rows(rows, config.max_length, seed=config.seed, shuffle=shuffle)
    return packs, replace(report, packs=len(packs), pack_capacity=config.max_length)


def _collator(config: Config, tokenizer: Any, token_multiple: int) -> Collate:
    if config.packing:
        flatten = config.attn_implementation == "flash_attention_2"
        return PackCollator(token_multiple=token_multiple, flatten=flatten)
    pad = tokenizer.pad_token_id
    pad = tokenizer.eos_token_id if pad is None else pad
    pad = 0 if pad is None else pad
    if TASKS[config.task].packs:
        return Collator(pad_id=pad, token_multiple=token_multiple)
    padding = Padding(pad_id=pad, token_multiple=token_multiple)
    if config.task == "seq_cls":
        return LabelCollator(padding=padding)
    if config.task == "embedding":
        return RelatedCollator(padding=padding)
    return (RatedCollator if rates_answers(config) else PairCollator)(padding=padding)


def _convert(entries: Sequence[str], config: Config, key: str) -> Converted:
    streamed = config.data.streaming and key == "dataset"
    rows = read_head(config) if streamed else read_examples(entries, config, key)
    settle_bad(rows.bad, rows.total, config)
    return rows


def _parts(
    rows: Converted, named: Converted | None, config: Config
) -> tuple[Converted, Converted | None]:
    """Rows to train on and to evaluate on: those of `val_dataset`, or a share set aside."""
    if config.val_dataset or config.split_dataset_ratio == 0:
        return rows, named
    return split_rows(rows, config.split_dataset_ratio, config.seed)


def split_rows(rows: Converted, ratio: float, seed: int) -> tuple[Converted, Converted]:
    """Set aside a share of the rows, drawn by `seed`; both parts keep the rows' order."""
    count = len(rows.examples)
    aside = _held_out(count, ratio)
    if aside < 1:
        raise SwiftFP8Error(
            f"{count} row can't be split into training and evaluation",
            where="split_dataset_ratio",
            fix="add rows, set split_dataset_ratio=0, or name a val_dataset",
        )
    drawn = set(random.Random(seed).sample(range(count), aside))
    kept = [example for k, example in enumerate(rows.examples) if k not in drawn]
    held = [example for k, example in enumerate(rows.examples) if k in drawn]
    return (
        Converted(examples=kept, sources=rows.sources, bad=rows.bad, total=rows.total),
        Converted(examples=held, sources=(), bad=[], total=len(held)),
    )


def _held_out(count: int, ratio: float) -> int:
    return min(max(1, round(count * ratio)), count - 1) if ratio > 0 else 0

"""A look at a data set before it is trained on: format, faults, duplicates, lengths, masks.

Every row is read, converted and compared. Lengths come from tokenizing, which takes longest: of a
large data set a sample drawn by `seed` is tokenized, and what is derived from it says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftfp8.data.chat import Example, tokenize_rows
from swiftfp8.data.dataset import split_rows
from swiftfp8.data.files import BadPlace
from swiftfp8.data.labels import find_head
from swiftfp8.data.lengths import MASKED, Fitted, Pair, fit_rows
from swiftfp8.data.overlap import count_known, digest
from swiftfp8.data.parts import tokenize_settings
from swiftfp8.data.processes import count_processes
from swiftfp8.data.reading import Converted, read_examples
from swiftfp8.data.report import SourceReport
from swiftfp8.data.streaming import read_head
from swiftfp8.data.task_tokens import tokenize_task
from swiftfp8.tasks import TASKS, Head

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

Tokenize = Callable[[Sequence[Example]], tuple[list[Pair], list[BadPlace]]]
_UNLIMITED = 2**31 - 1
_PAIRS_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """Text of neighbouring tokens that all have a loss, of one weight, or all have none."""

    text: str
    trained: bool
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """A row as it is trained: its runs up to `max_length`, and its tokens in all."""

    where: str
    runs: tuple[Run, ...]
    tokens: int
    trained: int
    cut: int  # tokens beyond max_length


@dataclass(frozen=True, kw_only=True)
class PartInspection:
    """What was found in `dataset` or `val_dataset`.

    `duplicates` counts rows equal to an earlier one; `pairs` names a few as (row, earlier row).
    `lengths` and `trained` are tokens of each of the `sampled` rows, before `max_length`.
    """

    name: str
    sources: tuple[SourceReport, ...]
    rows: int
    total: int
    bad: tuple[BadPlace, ...]
    duplicates: int
    pairs: tuple[tuple[str, str], ...]
    sampled: int
    max_length: int
    lengths: np.ndarray
    trained: np.ndarray
    fitted: Fitted
    shown: tuple[ShownRow, ...]

    @property
    def truncated_share(self) -> float:
        """Share of the sampled rows that are longer than `max_length`."""
        return float((self.lengths > self.max_length).mean()) if len(self.lengths) else 0.0


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Both parts; `leaked` of `held` evaluation rows are training rows as well.

    Rows that `split_dataset_ratio` sets aside are evaluation rows of no part of their own.
    """

    train: PartInspection
    eval: PartInspection | None
    leaked: int
    held: int


def inspect_datasets(config: Config, tokenizer: Any, *, sample: int, show: int) -> Inspection:
    """Look at `dataset` and `val_dataset` as `load_datasets` would read them.

    Args:
        config: as for `load_datasets`.
        tokenizer: a fast Hugging Face tokenizer.
        sample: how many rows of each part are tokenized; 0 takes all.
        show: how many rows are rendered, spread evenly over the part.

    Raises:
        SwiftFP8Error: what reading and tokenizing raise; bad rows are reported instead.
    """
    head = find_head(config) if config.task == "seq_cls" else None
    tokenize = partial(_tokenize, tokenizer=tokenizer, config=config, head=head)
    streamed = config.data.streaming
    train = read_head(config) if streamed else read_examples(config.dataset, config, "dataset")
    look = partial(
        _inspect, tokenizer=tokenizer, config=config, sample=sample, show=show, tokenize=tokenize
    )
    part, held_part, held = look(train, name="dataset"), None, None
    if config.val_dataset:
        held = read_examples(config.val_dataset, config, "val_dataset")
        held_part = look(held, name="val_dataset")
    elif config.split_dataset_ratio > 0 and len(train.examples) > 1:
        train, held = split_rows(train, config.split_dataset_ratio, config.seed)
    aside = held.examples if held else []
    return Inspection(
        train=part,
        eval=held_part,
        leaked=count_known(aside, train.examples),
        held=len(aside),
    )


def _inspect(
    rows: Converted,
    *,
    tokenizer: Any,
    config: Config,
    name: str,
    sample: int,
    show: int,
    tokenize: Tokenize,
) -> PartInspection:
    examples = rows.examples
    digests = [digest(example) for example in examples]
    first: dict[bytes, int] = {}
    repeated = []
    for index, said in enumerate(digests):
        if first.setdefault(said, index) != index:
            repeated.append(index)
    drawn: Sequence[Example] = examples
    if 0 < sample < len(examples):
        chosen = sorted(random.Random(config.seed).sample(range(len(examples)), sample))
        drawn = [examples[index] for index in chosen]
    pairs, bad = tokenize(drawn)
    return PartInspection(
        name=name,
        sources=rows.sources,
        rows=len(examples),
        total=rows.total,
        bad=(*rows.bad, *bad),
        duplicates=len(repeated),
        pairs=tuple(
            (examples[k].where, examples[first[digests[k]]].where) for k in repeated[:_PAIRS_SHOWN]
        ),
        sampled=len(drawn),
        max_length=config.max_length,
        lengths=np.array([len(pair[0]) for pair in pairs], dtype=np.int64),
        trained=np.array([np.count_nonzero(pair[1] != MASKED) for pair in pairs], dtype=np.int64),
        fitted=fit_rows(
            pairs, config.max_length, config.data.truncation, bos=tokenizer.bos_token_id
        ),
        shown=tuple(_show(examples, tokenizer, config, show, tokenize)),
    )


def _tokenize(
    examples: Sequence[Example], *, tokenizer: Any, config: Config, head: Head | None
) -> tuple[list[Pair], list[BadPlace]]:
    """Whole rows, however long; of a preference both answers."""
    if not TASKS[config.task].packs:
        unlimited = replace(config, max_length=_UNLIMITED)
        made = tokenize_task(examples, tokenizer, unlimited, head=head, pooling=None)
        return list(made.pairs), list(made.bad)
    settings = replace(tokenize_settings(config), max_length=_UNLIMITED)
    pairs: list[Pair] = []
    bad: list[BadPlace] = []
    processes = count_processes(config.data.num_proc, examples)
    for done in tokenize_rows(examples, tokenizer, settings, processes=processes):
        pairs += done.fitted.pairs
        bad += done.bad
    return pairs, bad


def _show(
    examples: Sequence[Example], tokenizer: Any, config: Config, count: int, tokenize: Tokenize
) -> list[ShownRow]:
    count = min(count, len(examples))
    shown = []
    for k in range(count):
        example = examples[k * len(examples) // count]
        pairs, _ = tokenize([example])
        for pair in pairs:
            ids, labels = pair[:2]
            cut = max(0, len(ids) - config.max_length)
            first = tuple(column[: config.max_length] for column in pair)
            if config.data.truncation == "left":
                bos = tokenizer.bos_token_id
                fitted = fit_rows([pair], config.max_length, "left", bos=bos)
                first = next(iter(fitted.pairs), first)
            runs = _runs(first, tokenizer)
            shown.append(
                ShownRow(
                    where=example.where,
                    runs=tuple(runs),
                    tokens=len(ids),
                    trained=int(np.count_nonzero(labels != MASKED)),
                    cut=cut,
                )
            )
    return shown


def _runs(pair: Pair, tokenizer: Any) -> list[Run]:
    ids, labels, *weights = pair
    weighed = np.where(labels != MASKED, *(weights or [1.0]), 0.0)
    edges = np.flatnonzero(np.diff(weighed)) + 1
    starts, ends = [0, *edges.tolist()], [*edges.tolist(), len(ids)]
    return [
        Run(
            text=tokenizer.decode(
                ids[a:b].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            trained=bool(labels[a] != MASKED),
            weight=float(weighed[a]),
        )
        for a, b in zip(starts, ends, strict=True)
    ]

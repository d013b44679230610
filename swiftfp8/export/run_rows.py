"""The run's own rows, tokenized as in training, for judging what is exported from it.

Evaluation rows are the best judges: the run never trained on them. Where there are none, rows that
it was trained on serve, and the report says so. Rows that chose the rounding (`export.calibrate`)
judge nothing. Of preferences the chosen answers are words to predict, of ratings the desired ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from swiftfp8.config.schema import Config
from swiftfp8.export.judge import Row
from swiftfp8.export.locate import tokenizer_dir
from swiftfp8.tasks import speaks

_SAMPLE = 256  # training rows per entry of `dataset`: more than the judges look at


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """Rows, "evaluation" or "training" ones; where there are none, `missing` says why.

    `unread`: there are rows, which could not be read.
    """

    rows: Sequence[Row] = ()
    kind: str = "evaluation"
    missing: str | None = None
    unread: bool = False


def read_run_rows(config: Config, model_dir: Path, adapter_dir: Path | None) -> RunRows:
    """The rows of `val_dataset`, those set aside from `dataset`, or those of `dataset`.

    Raises:
        SwiftFP8Error: rows that are named and can't be read.
    """
    if not speaks(config):
        return RunRows(missing=f"task={config.task} does not predict words")
    if config.val_dataset:
        entries, kind = tuple(config.val_dataset), "evaluation"
        clash = _calibrate(config, entries)
    elif (config.split_dataset_ratio > 0 or _holds_first(config)) and config.dataset:
        entries, kind = tuple(config.dataset), "evaluation"
        clash = _calibrate(config, entries, set_aside=not _holds_first(config))
    elif config.dataset:
        entries = tuple(map(_sampled, config.dataset))
        kind, clash = "training", _calibrate(config, entries)
    else:
        return RunRows(missing="no rows are known (a run has its own)")
    if clash:
        return RunRows(missing="the run's rows chose the rounding, so they can't judge it")
    rows = _tokenized(config, entries, model_dir, tokenizer_dir(model_dir, adapter_dir))
    if not rows:
        return RunRows(missing="none of the run's rows is a desired answer")
    return RunRows(rows=rows, kind=kind)


def _calibrate(config: Config, entries: Sequence[str], *, set_aside: bool = False) -> bool:
    """Whether rows of `entries` choose the rounding; of a split only where they are named for it.

    `set_aside`: they are the rows that a split kept from training.
    """
    named = config.export.calibration_dataset
    if not config.export.calibrate or (set_aside and not named):
        return False
    return bool(data_sets(entries) & data_sets(named or config.dataset))


def data_sets(entries: Sequence[str]) -> set[str]:
    """What data sets the entries are of, however many of their rows; files by their whole path."""
    names = map(_name, entries)
    return {str(Path(name).resolve()) if Path(name).exists() else name for name in names}


def rows_of_words(rows: Any) -> Iterator[tuple[Any, Any]]:
    """Token ids and labels of rows that a task tokenized: of preferences those to be learned."""
    for index in range(len(rows)):
        row = rows[index]
        if "chosen_ids" in row:
            yield row["chosen_ids"], row["chosen_labels"]
        elif "good" not in row:
            yield row["input_ids"], row["labels"]
        elif row["good"]:
            yield row["ids"], row["labels"]


def take_rows(rows: Sequence[Row], tokens: int) -> list[Row]:
    """Rows spread evenly over all of them, with about `tokens` tokens in all; one at least."""
    lengths = [len(row.ids_T) for row in rows]
    total = sum(lengths)
    if total <= tokens:
        return list(rows)
    count = max(1, int(len(rows) * tokens / total))
    return [rows[index * len(rows) // count] for index in range(count)]


def _tokenized(
    config: Config, entries: Sequence[str], model_dir: Path, tokenizer_dir: Path
) -> list[Row]:
    """The rows of `entries`; of a split, the part that was set aside."""
    from swiftfp8.data.dataset import load_datasets
    from swiftfp8.models.checkpoint import read_config_json
    from swiftfp8.models.family import family_of
    from swiftfp8.models.source import ModelSource
    from swiftfp8.models.tokenizer import load_tokenizer

    source = ModelSource(
        name=model_dir.name,
        path=tokenizer_dir,
        family=family_of(read_config_json(model_dir)),
        origin=str(model_dir),
    )
    tokenizer = load_tokenizer(source, config.template, config.trust_remote_code)
    split = not config.val_dataset and config.split_dataset_ratio > 0
    first = _holds_first(config)
    reading = replace(
        config,
        dataset=list(entries),
        val_dataset=[],
        split_dataset_ratio=config.split_dataset_ratio if split else 0.0,
        packing=False,
        data=replace(
            config.data,
            truncation="right",
            interleave_prob=config.data.interleave_prob if first else [],
            streaming=config.data.streaming and not config.val_dataset,
        ),
    )
    datasets = load_datasets(reading, tokenizer, 1, whole=not first)
    found = datasets.eval if split or first else datasets.train
    assert found is not None
    return [
        Row(
            ids_T=torch.as_tensor(ids, dtype=torch.int64),
            labels_T=torch.as_tensor(labels, dtype=torch.int64),
        )
        for ids, labels in rows_of_words(found)
    ]


def _holds_first(config: Config) -> bool:
    """Whether a stream's first rows were set aside."""
    data = config.data
    return data.streaming and data.eval_rows > 0 and not config.val_dataset


def _sampled(entry: str) -> str:
    """The entry with no more than `_SAMPLE` of its rows."""
    name, wanted = _name(entry), re.search(r"#(\d+)$", entry)
    return f"{name}#{min(int(wanted[1]), _SAMPLE) if wanted else _SAMPLE}"


def _name(entry: str) -> str:
    return re.sub(r"#\d+$", "", entry)

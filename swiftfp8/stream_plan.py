"""What `data.streaming` asks of a job, and what it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.tasks import TASKS

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config


def stream_problems(config: Config) -> list[SwiftFP8Error]:
    """Options that need all rows to be known, or that only a stream reads."""
    data = config.data
    if not data.streaming:
        usual = type(data)()
        names = ("eval_rows", "shuffle_buffer")
        asked = [name for name in names if getattr(data, name) != getattr(usual, name)]
        return [
            SwiftFP8Error(
                f"data.{name} is read with data.streaming=true alone",
                where=f"data.{name}",
                fix="leave it out" + (" (split_dataset_ratio)" if name == "eval_rows" else ""),
            )
            for name in asked
        ]
    sampled = [entry for entry in config.dataset if "#" in entry]
    faults = (
        (
            not TASKS[config.task].packs,
            f"rows of task={config.task} are read whole",
            "data.streaming",
            "set data.streaming=false",
        ),
        (
            config.max_steps <= 0,
            "how many rows a stream has is not known, so epochs can't be counted",
            "max_steps",
            "set max_steps=N",
        ),
        (
            config.split_dataset_ratio > 0,
            "a share of a stream can't be set aside, since its rows are not counted",
            "split_dataset_ratio",
            "set data.eval_rows=N for its first N rows, or name a val_dataset",
        ),
        (
            data.eval_rows > 0 and bool(config.val_dataset),
            "evaluation rows are given twice: data.eval_rows and val_dataset",
            "data.eval_rows",
            "leave one of them out",
        ),
        (
            config.train.tokens_per_step > 0,
            "how long a stream's rows are is not known",
            "train.tokens_per_step",
            "set gradient_accumulation_steps",
        ),
        (
            data.cache,
            "a stream's tokens are made as they are needed, and not kept",
            "data.cache",
            "set data.cache=false, or data.streaming=false",
        ),
        (
            data.num_workers > 1,
            "a stream is read by one process, in order",
            "data.num_workers",
            "set data.num_workers=1",
        ),
        (
            (data.num_proc or 1) > 1,
            "a stream is tokenized by the process that reads it",
            "data.num_proc",
            "leave it out",
        ),
        (
            bool(sampled),
            f"'{''.join(sampled[:1])}' asks for rows drawn from all, and a stream's are not known",
            "dataset",
            "leave #N out",
        ),
    )
    return [SwiftFP8Error(what, where=where, fix=fix) for bad, what, where, fix in faults if bad]


def stream_notes(config: Config) -> list[str]:
    """What is other than with rows that are held whole."""
    data = config.data
    if not data.streaming:
        return []
    order = (
        f"shuffled in blocks of {data.shuffle_buffer:,} rows (data.shuffle_buffer)"
        if data.shuffle
        else "in their order"
    )
    if config.val_dataset:
        held = "val_dataset, held whole"
    else:
        held = f"the first {data.eval_rows:,} rows" if data.eval_rows else "nothing"
    return [
        f"rows are read while training, {order}, for {config.max_steps} steps, as often as that "
        f"takes; none are counted, no lengths are known before; evaluation is on {held}"
    ]

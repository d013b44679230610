"""`data.streaming`: what is read before a run begins, and the stream itself."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from swiftfp8.data.chat import TokenizeSettings
from swiftfp8.data.reading import Converted
from swiftfp8.data.report import StreamReport
from swiftfp8.data.stream_blocks import BlockReader
from swiftfp8.errors import SwiftFP8Error

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config
    from swiftfp8.data.stream import Stream

HEAD = 5_000  # rows that stand for all where a look at some is enough
_PROBED = 256  # rows that are read before a run begins, so that most faults show then


def read_head(config: Config, rows: int | None = None) -> Converted:
    """The first rows of a stream as if they were all; samples (`#N`) are not drawn.

    Raises:
        SwiftFP8Error: what reading the entries raises.
    """
    reader = BlockReader.of(config)
    block = reader.next_block(rows or HEAD)
    given = Counter(example.entry for example in block.examples)
    sources = tuple(
        source.counted(given[config.dataset.index(source.entry)]) for source in reader.formats()
    )
    total = len(block.examples) + len(block.bad)
    return Converted(examples=block.examples, sources=sources, bad=block.bad, total=total)


def open_stream(
    config: Config, tokenizer: Any, settings: TokenizeSettings
) -> tuple[Stream, Converted, Converted | None, StreamReport]:
    """The stream, its first rows to be checked, those set aside to evaluate on, and a report.

    Raises:
        SwiftFP8Error: what reading the entries raises; `data.eval_rows` leaves nothing to train.
    """
    from swiftfp8.data.stream import Stream

    reader = BlockReader.of(config)
    report = StreamReport(sources=reader.formats(), buffer=config.data.shuffle_buffer)
    wanted = config.data.eval_rows
    held = None
    if wanted:
        block = reader.next_block(wanted)
        if block.ends_turn or not reader.begin_here().next_block(1).examples:
            raise SwiftFP8Error(
                f"the stream has no more than {len(block.examples)} rows, and all of them are set "
                "aside to evaluate on",
                where="data.eval_rows",
                fix="lower it, or name a val_dataset",
            )
        total = len(block.examples) + len(block.bad)
        held = Converted(examples=block.examples, sources=(), bad=block.bad, total=total)
        reader = reader.begin_here()
    stream = Stream(config, reader, tokenizer, settings)
    return stream, read_head(config, _PROBED), held, report

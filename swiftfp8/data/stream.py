"""Rows read, tokenized and packed while a run trains (`data.streaming`): nothing is held whole.

The data loader's one process makes a block (stream_blocks.py) in a thread while the block before
is handed out, so that neither the training loop nor the GPU waits for it. Each sample carries its
place in the stream; that of the last one trained is what a checkpoint keeps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset

from swiftfp8.data.chat import RowEncoder, TokenizeSettings
from swiftfp8.data.files import BadPlace
from swiftfp8.data.lengths import Pair
from swiftfp8.data.packing import PackedRows, pack_rows
from swiftfp8.data.report import bad_rows_error, count_reasons
from swiftfp8.data.stream_blocks import Block, BlockReader, Position
from swiftfp8.data.token_rows import TokenRows
from swiftfp8.errors import SwiftFP8Error

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

log = logging.getLogger(__name__)
PLACE, ERROR = "stream_position", "stream_error"
Sample = dict[str, Any]


class Stream(IterableDataset[Sample]):
    """Endless samples, or packs, of `dataset`: pass after pass, each in another order.

    A sample has its place under `PLACE`. What can't be read ends the stream with a sample that
    holds the error under `ERROR`: a loader process could pass on its text alone.
    """

    def __init__(
        self, config: Config, reader: BlockReader, tokenizer: Any, settings: TokenizeSettings
    ) -> None:
        self._config = config
        self._reader = reader
        self._tokenizer = tokenizer
        self._settings = settings
        self._start = reader.position

    def start_at(self, position: Mapping[str, Any]) -> None:
        """Go on after the sample that had this place.

        Raises:
            SwiftFP8Error: the place is of another number of entries.
        """
        start = Position.from_json(dict(position))
        if len(start.places) != len(self._start.places):
            raise SwiftFP8Error(
                f"the checkpoint was trained on a stream of {len(start.places)} data sets, and "
                f"dataset names {len(self._start.places)}: where to go on can't be told",
                where="resume_from_checkpoint",
                fix="name the data sets that the run began with",
            )
        self._start = start

    def __iter__(self) -> Iterator[Sample]:
        self._reader.go_to(self._start)
        maker = _BlockMaker(self._config, self._tokenizer, self._settings)
        skipped = self._start.taken
        left_out = Counter(self._start.left_out)
        with ThreadPoolExecutor(1) as ahead:
            following = ahead.submit(maker.make, self._reader)
            while True:
                try:
                    begins, rows, order, lost = following.result()
                except SwiftFP8Error as error:
                    yield {ERROR: error}
                    return
                following = ahead.submit(maker.make, self._reader)
                left = [] if rows is None else rows.__getitems__(order[skipped:])
                if not skipped:  # else the place that was gone to counts them
                    left_out.update(lost)
                for taken, row in enumerate(left, start=skipped + 1):
                    yield {**row, PLACE: replace(begins, taken=taken, left_out=dict(left_out))}
                skipped = 0


class _BlockMaker:
    """Tokenizes and packs blocks; remembers words from one to the next."""

    def __init__(self, config: Config, tokenizer: Any, settings: TokenizeSettings) -> None:
        self._config = config
        self._encoder = RowEncoder(tokenizer, settings)
        self._told = False
        self._found = True  # a sample in this pass, as far as is known

    def make(
        self, reader: BlockReader
    ) -> tuple[Position, TokenRows | PackedRows | None, np.ndarray, Counter[str]]:
        """The next block: where it begins, its rows or packs, their order, and what is left out."""
        config = self._config
        block = reader.next_block(config.data.shuffle_buffer)
        rows, lost = self._tokenized(block)
        self._require_rows(block, rows)
        if rows is None:
            return block.begins, None, np.empty(0, dtype=np.int64), lost
        rng = np.random.default_rng([*block.begins.seed(config.seed), 1])
        shuffle = config.data.shuffle
        made: TokenRows | PackedRows = rows
        if config.packing:
            seed = int(rng.integers(2**31))
            made = pack_rows(rows, config.max_length, seed=seed, shuffle=shuffle)
        order = rng.permutation(len(made)) if shuffle else np.arange(len(made))
        return block.begins, made, order, lost

    def _tokenized(self, block: Block) -> tuple[TokenRows | None, Counter[str]]:
        pairs: list[Pair] = []
        bad = list(block.bad)
        lost: Counter[str] = Counter()
        for done in self._encoder.tokenize(block.examples):
            pairs += done.fitted.pairs
            bad += done.bad
            lost.update(done.fitted.dropped)
        self._settle(bad, len(block.examples) + len(block.bad))
        lost.update(count_reasons(bad))
        return (TokenRows.of(pairs) if pairs else None), lost

    def _settle(self, bad: Sequence[BadPlace], rows: int) -> None:
        if bad and self._config.data.on_bad_row == "error":
            raise bad_rows_error(list(bad), rows)
        if bad and not self._told:
            self._told = True
            log.warning("bad rows are skipped; the first: %s: %s", bad[0].where, bad[0].reason)

    def _require_rows(self, block: Block, rows: TokenRows | None) -> None:
        begins = block.begins.block == 0
        self._found = rows is not None or (self._found and not begins)
        if block.ends_turn and not self._found:
            raise SwiftFP8Error(
                "a whole pass over the data held no row to train on",
                where="dataset",
                fix="raise max_length, or correct the rows",
            )


@dataclass(frozen=True, kw_only=True)
class StreamCollator:
    """Collates samples of a stream, and rows without a place, by the job's own collator."""

    inner: Callable[[Sequence[Sample]], dict[str, Any]]

    def __call__(self, rows: Sequence[Sample]) -> dict[str, Any]:
        """The inner collator's batch and the last sample's place; or an error that a row holds."""
        failed = next((row for row in rows if ERROR in row), None)
        if failed is not None:
            return failed
        batch = self.inner([{k: v for k, v in row.items() if k != PLACE} for row in rows])
        return {**batch, PLACE: rows[-1][PLACE]} if PLACE in rows[-1] else batch


def take_place(batch: dict[str, Any]) -> dict[str, Any] | None:
    """Take a batch's place in the stream out of it, where it has one.

    Raises:
        SwiftFP8Error: the batch is the stream's last, and says why there is no more.
    """
    if ERROR in batch:
        raise batch[ERROR]
    place: Position | None = batch.pop(PLACE, None)
    return None if place is None else place.to_json()

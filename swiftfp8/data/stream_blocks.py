"""A stream cut into blocks of `data.shuffle_buffer` rows, each of which can be made again.

A block's rows, their mixing and their order depend on where it begins, on `seed`, on the pass over
the data and on the block's number in it, and on nothing that happened before. So a place in the
stream is a handful of numbers, and a run that resumes makes one block again, not all before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftfp8.data.chat import Example
from swiftfp8.data.files import BadPlace
from swiftfp8.data.report import SourceReport
from swiftfp8.data.sources import no_rows
from swiftfp8.data.stream_sources import Place, StreamSource, read_on, stream_sources
from swiftfp8.errors import SwiftFP8Error

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config

_DRAWN = 4096  # entries at once


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a block begins, and how many of its samples were taken.

    `places` and `done` are of each entry: how far it was read, and whether to its end. `left_out`
    says how many rows gave no sample, by reason, this block's included once a sample is taken.
    """

    places: tuple[Place, ...]
    done: tuple[bool, ...]
    turn: int = 0  # passes over the data before
    block: int = 0
    taken: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def at(cls, places: Sequence[Place], turn: int = 0) -> Position:
        """The beginning of a pass."""
        return cls(places=tuple(places), done=(False,) * len(places), turn=turn)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Position:
        """What `to_json` gave."""
        places = tuple((int(file), int(row)) for file, row in values["places"])
        return cls(**{**values, "places": places, "done": tuple(values["done"])})

    def to_json(self) -> dict[str, Any]:
        """Values for a checkpoint's manifest."""
        return asdict(self)

    def seed(self, seed: int) -> list[int]:
        """What the block's drawing and order depend on."""
        return [seed, self.turn, self.block]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Converted rows of a block, in the order in which they were read."""

    begins: Position
    examples: list[Example]
    bad: list[BadPlace]
    ends_turn: bool


class BlockReader:
    """Reads one block after the other; entries mixed by their shares, or one after the other."""

    def __init__(
        self, config: Config, sources: Sequence[tuple[StreamSource, ...]], first: Sequence[Place]
    ) -> None:
        """`first` is where each pass begins."""
        self._config = config
        self._sources = sources
        self._first = tuple(first)
        shares = config.data.interleave_prob
        self._shares = np.array(shares, dtype=np.float64) / sum(shares) if shares else None
        self.go_to(Position.at(first))

    @classmethod
    def of(cls, config: Config) -> BlockReader:
        """Of all entries of `dataset`, from their beginning.

        Raises what `stream_sources` raises.
        """
        names = [re.sub(r"#\d+$", "", entry) for entry in config.dataset]
        sources = [stream_sources(name, config.hub) for name in names]
        return cls(config, sources, [(0, 0)] * len(sources))

    def go_to(self, position: Position) -> None:
        """The next block is the one that begins there."""
        self.position = replace(position, taken=0)
        self._rows = [self._read(k, place) for k, place in enumerate(position.places)]

    def begin_here(self) -> BlockReader:
        """A reader of what follows, for which each pass begins at this place."""
        return BlockReader(self._config, self._sources, self.position.places)

    def formats(self) -> tuple[SourceReport, ...]:
        """Each entry's first file with its format; rows are not counted.

        Raises:
            SwiftFP8Error: an entry has no rows, and what reading them raises.
        """
        found = []
        for entry, sources in zip(self._config.dataset, self._sources, strict=True):
            empty = True
            for source, where, row in ((s, at, row) for s in sources for _, at, row in s.rows(0)):
                empty = False
                if not isinstance(row, BadPlace):
                    told = source.shape(row, where, self._config).source
                    found.append(replace(told, entry=entry, where=source.where, rows=None))
                    break
            if empty:
                raise no_rows(entry, sources[0].where)
        return tuple(found)

    def next_block(self, size: int) -> Block:
        """Up to `size` rows that can be used; fewer where the pass ends.

        Raises what reading the sources raises.
        """
        begins = self.position
        places, done = list(begins.places), list(begins.done)
        examples: list[Example] = []
        bad: list[BadPlace] = []
        ends = False
        draws = self._draws(begins)
        while len(examples) < size and not ends:
            entry = done.index(False) if draws is None else next(draws)
            found = next(self._rows[entry], None)
            if found is None:
                done[entry] = True
                once = self._config.data.stopping_strategy == "first_exhausted"
                ends = all(done) or (draws is not None and once)
                if draws is not None and not ends:
                    self._rows[entry] = self._read(entry, self._first[entry])
                    found = next(self._rows[entry], None)
                    if found is None:
                        raise SwiftFP8Error(
                            f"'{self._config.dataset[entry]}' has no row to mix in",
                            where="data.interleave_prob",
                            fix="leave the entry out",
                        )
            if found is not None:
                places[entry], made = found
                (bad if isinstance(made, BadPlace) else examples).append(made)  # type: ignore[arg-type]
        block = Block(begins=begins, examples=examples, bad=bad, ends_turn=ends)
        if ends:
            self.go_to(Position.at(self._first, begins.turn + 1))
        else:
            self.position = replace(
                begins, places=tuple(places), done=tuple(done), block=begins.block + 1
            )
        return block

    def _read(self, entry: int, place: Place) -> Iterator[tuple[Place, Example | BadPlace]]:
        return read_on(self._sources[entry], entry, self._config, place)

    def _draws(self, begins: Position) -> Iterator[int] | None:
        if self._shares is None:
            return None
        rng = np.random.default_rng(begins.seed(self._config.seed))
        return self._drawn(rng, self._shares)

    @staticmethod
    def _drawn(rng: np.random.Generator, shares: np.ndarray) -> Iterator[int]:
        while True:
            yield from rng.choice(len(shares), size=_DRAWN, p=shares).tolist()

"""Several rows in one sequence, so that no compute is spent on padding.

Rows are drawn in an order given by `seed`, cut into windows, and each window is packed first-fit
decreasing: the longest row first, each into the first sequence that has room. No row is split.

Rows in a sequence must not see each other. Positions restart at 0 with each row, there is no
attention mask, and no key/value cache: from that transformers derives a mask that is causal and
block-diagonal (with an all-ones mask it would not). The first token of a row is nobody's next
token, so its label is masked.

A sequence is filled up to the recipe's token multiple by its own first tokens over again, as rows
of their own without a loss. Attention is causal, so these repeat activations that the sequence has
anyway, and their gradients are zero: no amax sees a value that the real tokens don't produce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftfp8.data.lengths import MASKED

if TYPE_CHECKING:
    import torch

    from swiftfp8.data.token_rows import TokenRows

WINDOW = 4096  # rows packed together: enough to fill sequences, few enough to keep the data mixed


def pack_rows(
    rows: TokenRows, capacity: int, *, seed: int, shuffle: bool = True, window: int = WINDOW
) -> PackedRows:
    """Pack rows into sequences of at most `capacity` tokens; the same arguments, the same packs.

    With `shuffle` the rows of a window are drawn from anywhere; without, windows and the sequences
    of a window keep the order of their first rows. The emptiest sequence of a window is unpacked
    again, its rows going to the next.
    """
    count = len(rows)
    drawn = np.random.default_rng(seed).permutation(count) if shuffle else np.arange(count)
    packs: list[np.ndarray] = []
    carried = np.empty(0, dtype=np.int64)
    for start in range(0, count, window):
        part = np.concatenate([carried, drawn[start : start + window]])
        found = [part[pack] for pack in first_fit_decreasing(rows.lengths[part], capacity)]
        if start + window < count:
            carried = found.pop(int(np.argmin([rows.lengths[pack].sum() for pack in found])))
        packs += found
    return PackedRows(rows, packs)


def first_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Indices of `lengths` by pack, none over `capacity`; n log n.

    A binary tree holds the room of every pack that could be needed, the largest of two children in
    their parent, so the first pack with room is found from the root.
    """
    sizes = np.asarray(lengths)
    assert len(sizes) and sizes.max() <= capacity
    leaves = 1 << (len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    packs: list[list[int]] = []
    for index in np.argsort(-sizes, kind="stable").tolist():
        size, node = int(sizes[index]), 1
        while node < leaves:
            node *= 2
            if room[node] < size:
                node += 1
        if node - leaves == len(packs):
            packs.append([])
        packs[node - leaves].append(index)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return sorted(sorted(pack) for pack in packs)


class PackedRows:
    """Map-style packs `{input_ids, labels, position_ids}` of int64 arrays, and rows' weights."""

    def __init__(self, rows: TokenRows, packs: Sequence[np.ndarray]) -> None:
        order = np.concatenate(packs)
        self._columns = rows.gather(order)
        self._row_lengths = rows.lengths[order]
        starts = np.cumsum(self._row_lengths) - self._row_lengths
        self._columns["labels"][starts] = MASKED
        self._first_row = np.cumsum([0, *map(len, packs)])
        ends = np.append(starts, self._row_lengths.sum())[self._first_row]
        self._ends = ends[1:]
        self.lengths = np.diff(ends)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, np.ndarray]]:
        """Packs, for torch's data loader."""
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = range(len(self))[index]
        end = self._ends[index]
        start = end - self.lengths[index]
        first, last = self._first_row[index : index + 2]
        pack = {name: column[start:end] for name, column in self._columns.items()}
        for name in ("input_ids", "labels"):
            pack[name] = pack[name].astype(np.int64)
        return {**pack, "position_ids": _positions(self._row_lengths[first:last])}


@dataclass(frozen=True, kw_only=True)
class PackCollator:
    """Packs to tensors, filled up (see above) to one length, a multiple of `token_multiple`.

    `flatten` puts all packs into one row, which flash attention needs: of several rows it would not
    see where the packed ones begin.
    """

    token_multiple: int = 1
    flatten: bool = False

    def __call__(self, packs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """`input_ids labels position_ids` [packs, length] int64, and `num_tokens`.

        Where rows have `loss_weights`, those too, in float32.
        `num_tokens` counts tokens without those that fill up; it is the trainer's, not the model's.
        """
        if self.flatten:
            packs = [{key: np.concatenate([pack[key] for pack in packs]) for key in packs[0]}]
        longest = max(len(pack["input_ids"]) for pack in packs)
        length = -(-longest // self.token_multiple) * self.token_multiple
        batch: dict[str, Any] = {
            key: _stack([np.resize(pack[key], length) for pack in packs])
            for key in ("input_ids", "position_ids")
        }
        for key, fill in (("labels", MASKED), ("loss_weights", 0.0)):
            if key in packs[0]:
                batch[key] = _stack([_extend(pack[key], length, fill) for pack in packs])
        batch["num_tokens"] = sum(len(pack["input_ids"]) for pack in packs)
        return batch


def _positions(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... for each length, one after the other."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(starts, lengths)


def _extend(row: np.ndarray, length: int, fill: float) -> np.ndarray:
    return np.append(row, np.full(length - len(row), fill, dtype=row.dtype))


def _stack(rows: list[np.ndarray]) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.stack(rows))

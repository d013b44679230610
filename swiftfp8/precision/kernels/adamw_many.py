"""AdamW on many parameters in one launch, bit for bit adamw.py's steps of each.

A launch costs a host some 40 us, and a model has hundreds of parameters. Here two tables on the
device take the place of arguments:

- a row a parameter, written by the host in every step, for gradients move: five addresses, the
  size, and what depends on the parameter's own count of steps;
- a (row, tile) a program, which stays while the sizes do.

A row of size 0 is a parameter that this launch leaves alone. Addresses and sizes must be multiples
of 16, which the kernel is told: of numbers from memory the compiler knows nothing, and each load
would be one of a single element. The copies to the device come from page-locked memory, so the
host waits for nothing.
"""

import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from swiftfp8.precision.kernels._triton import jit, tl
from swiftfp8.precision.kernels.adamw import PART, PARTS, update_tile

TILE = PARTS * PART
_ALIGNMENT = 16  # of addresses in bytes, and of sizes
# Addresses of weight, remainder, gradient, exp_avg and exp_avg_sq; size; step, position;
# inverse_root, move. The kernel reads it as int64, int32 and FP32 numbers.
_ROW = struct.Struct("<6q2i2f")
_WORDS = 8  # of int64 in a row


class Stepped(NamedTuple):
    """A parameter to step: what `adamw_step_` takes, and its row in the tables."""

    row: int
    tensors: tuple[torch.Tensor, ...]
    """Weight, remainder, gradient, exp_avg and exp_avg_sq, contiguous and of one size."""
    addresses: list[int]
    size: int
    step: int
    position: int

    @classmethod
    def of(cls, row: int, tensors: tuple[torch.Tensor, ...], step: int, position: int) -> "Stepped":
        """With the tensors' addresses and size."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        return cls(row, tensors, addresses, tensors[0].numel(), step, position)

    @property
    def aligned(self) -> bool:
        """Whether addresses and size allow vector loads; if not, `adamw_step_` is for it."""
        w, r, g, m, v = self.addresses
        return (w | r | g | m | v | self.size) % _ALIGNMENT == 0


@dataclass(frozen=True, eq=False)
class Tiles:
    """The (row, tile) of each program: int32 [programs, 2], for rows of `sizes` elements."""

    sizes: tuple[int, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> "Tiles":
        """The table for rows of these sizes."""
        counts = (torch.tensor(sizes, dtype=torch.int64) + (TILE - 1)) // TILE
        rows = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        first = counts.cumsum(0) - counts
        tiles = torch.arange(len(rows)) - first[rows]
        table = torch.stack([rows, tiles], dim=1).to(torch.int32)
        return cls(tuple(sizes), _to_device(table, device))


def adamw_steps_(
    parameters: Sequence[Stepped],
    tiles: Tiles,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """A step of every parameter, in place, in one launch.

    All are `aligned`, lie on the device of `tiles`, and agree in the dtypes of gradients and of
    moments. Each one's row of `tiles` has its size.
    """
    weight, _, gradient, exp_avg, _ = parameters[0].tensors
    rows = _rows(parameters, len(tiles.sizes), lr, betas)
    beta1, beta2 = betas
    rounded = exp_avg.dtype == torch.bfloat16
    with torch.cuda.device_of(weight):
        table = _to_device(rows, tiles.table.device)
        _adamw_many[(len(tiles.table),)](
            table,
            table.view(torch.int32),
            table.view(torch.float32),
            tiles.table,
            1.0 - lr * weight_decay,
            1.0 - beta1,
            float(beta2),
            1.0 - beta2,
            float(eps),
            FP32_GRADIENT=gradient.dtype == torch.float32,
            ROUND=rounded,
            PART=PART,
            num_warps=4 if rounded else 8,  # as in adamw_step_
        )


def _rows(
    parameters: Sequence[Stepped], count: int, lr: float, betas: tuple[float, float]
) -> torch.Tensor:
    """The table of `count` rows: int64 [count, 8]."""
    beta1, beta2 = betas
    table = bytearray(_ROW.size * count)
    scalars: dict[int, tuple[float, float]] = {}  # most parameters are at the same step
    for row, _, addresses, size, step, position in parameters:
        if step not in scalars:
            inverse_root = 1.0 / math.sqrt(1.0 - beta2**step)
            scalars[step] = inverse_root, -lr / (1.0 - beta1**step)
        start = row * _ROW.size
        _ROW.pack_into(table, start, *addresses, size, step, position, *scalars[step])
    return torch.frombuffer(table, dtype=torch.int64).view(count, _WORDS)


def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for.

    Page-locked memory is given to another tensor only after the copy: torch's allocator sees to
    that.
    """
    if device.type == "cpu":  # under Triton's interpreter
        return host
    try:
        host = host.pin_memory()
    except RuntimeError as error:
        warnings.warn(
            f"AdamW's steps wait for the device: no pinned memory ({error})", stacklevel=2
        )
    return host.to(device, non_blocking=True)


@jit
def _adamw_many(
    ADDRESSES, INTEGERS, FLOATS, TILES, keep, rate1, beta2, rate2, eps,
    FP32_GRADIENT: tl.constexpr, ROUND: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(TILES + 2 * program).to(tl.int64)
    tile = tl.load(TILES + 2 * program + 1)
    size = tl.load(ADDRESSES + 8 * row + 5)
    size = tl.multiple_of(size, 16)
    if tile.to(tl.int64) * (4 * PART) < size:
        W = _pointer(ADDRESSES + 8 * row, tl.bfloat16)
        R = _pointer(ADDRESSES + 8 * row + 1, tl.int16)
        G = _pointer(ADDRESSES + 8 * row + 2, tl.float32 if FP32_GRADIENT else tl.bfloat16)
        M = _pointer(ADDRESSES + 8 * row + 3, tl.bfloat16 if ROUND else tl.float32)
        V = _pointer(ADDRESSES + 8 * row + 4, tl.bfloat16 if ROUND else tl.float32)
        step = tl.load(INTEGERS + 16 * row + 12)
        position = tl.load(INTEGERS + 16 * row + 13)
        inverse_root = tl.load(FLOATS + 16 * row + 14)
        move = tl.load(FLOATS + 16 * row + 15)
        update_tile(
            W, R, G, M, V, size, tile, step, position,
            keep, rate1, beta2, rate2, inverse_root, eps, move, ROUND, PART,
        )  # fmt: skip


@jit
def _pointer(address, dtype: tl.constexpr):
    """The pointer at an address, of which the host has checked the alignment."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), 16)

"""The tables that one launch of AdamW on many parameters reads, and what the host does for it."""

from __future__ import annotations

import math
import struct
from unittest import mock

import pytest
import torch

from swiftfp8.precision.kernels import _triton, adamw_many
from swiftfp8.precision.kernels.adamw_many import TILE, Stepped, Tiles
from swiftfp8.train import masters
from swiftfp8.train.masters import MasterAdamW

CPU = torch.device("cpu")


def stepped(row: int, size: int, step: int, position: int, offset: int = 0) -> Stepped:
    dtypes = (torch.bfloat16, torch.int16, torch.bfloat16, torch.float32, torch.float32)
    tensors = [torch.zeros(size, dtype=dtype) for dtype in dtypes]
    tensors[2] = torch.zeros(size + offset, dtype=torch.bfloat16)[offset:]
    return Stepped.of(row, tuple(tensors), step, position)


def test_every_tile_of_every_row_has_one_program():
    sizes = (1, 0, TILE, TILE + 1, 3 * TILE)
    tiles = Tiles.of(sizes, CPU)
    assert tiles.sizes == sizes and tiles.table.dtype == torch.int32
    expected = [[0, 0], [2, 0], [3, 0], [3, 1], [4, 0], [4, 1], [4, 2]]
    assert tiles.table.tolist() == expected


def test_a_row_holds_addresses_size_and_the_parameters_own_step():
    lr, betas = 1e-3, (0.9, 0.95)
    some = [stepped(2, 16, step=7, position=12), stepped(0, 32, step=1, position=10)]
    table = adamw_many._rows(some, 3, lr, betas)
    assert table.dtype == torch.int64 and table.shape == (3, 8)
    assert not table[1].any()  # size 0: not stepped
    for one in some:
        assert table[one.row, :5].tolist() == [tensor.data_ptr() for tensor in one.tensors]
        assert table[one.row, 5] == one.tensors[0].numel()
        assert table.view(torch.int32)[one.row, 12:14].tolist() == [one.step, one.position]
        # Rounded to FP32 as an argument of a kernel is.
        scalars = (1 / math.sqrt(1 - betas[1] ** one.step), -lr / (1 - betas[0] ** one.step))
        rounded = struct.unpack("2f", struct.pack("2f", *scalars))
        assert tuple(table.view(torch.float32)[one.row, 14:].tolist()) == rounded


@pytest.mark.parametrize("size, offset, aligned", [(32, 0, True), (32, 1, False), (40, 0, False)])
def test_addresses_and_sizes_must_be_multiples_of_16(size, offset, aligned):
    assert stepped(0, size, 1, 0, offset).aligned is aligned


def test_without_page_locked_memory_the_copy_is_a_plain_one():
    host = torch.zeros(3)
    with (
        mock.patch.object(torch.Tensor, "pin_memory", side_effect=RuntimeError("no memory left")),
        pytest.warns(UserWarning, match="wait for the device.*no memory left"),
    ):
        assert adamw_many._to_device(host, torch.device("meta")).is_meta


def test_tiles_stay_while_sizes_do_and_each_group_has_a_launch():
    weights = [torch.nn.Parameter(torch.zeros(16 * n, dtype=torch.bfloat16)) for n in (1, 2, 3, 4)]
    groups = [{"params": weights[:2], "lr": 1e-3}, {"params": weights[2:3], "lr": 1e-4}]
    optimizer = MasterAdamW(groups)
    launched = mock.Mock()
    used = []
    with (
        mock.patch.object(_triton, "runs_triton", lambda x: True),
        mock.patch.object(_triton, "MISSING", None),
        mock.patch.object(masters, "adamw_steps_", launched),
    ):
        for step in range(3):
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
            if step == 1:
                weights[0].grad = None
            if step == 2:
                optimizer.param_groups[1]["params"].append(weights[3])
            optimizer.step()
            used.append([call.args[1] for call in launched.call_args_list[-2:]])
    assert launched.call_count == 6
    assert [call.kwargs["lr"] for call in launched.call_args_list[:2]] == [1e-3, 1e-4]
    assert used[0][0] is used[1][0] is used[2][0] and used[0][0].sizes == (16, 32)
    assert used[0][1] is used[1][1] and used[2][1].sizes == (48, 64)
    stepped = [
        [(one.row, one.position, one.step) for one in c.args[0]] for c in launched.mock_calls
    ]
    assert stepped[::2] == [[(0, 0, 1), (1, 1, 1)], [(1, 1, 2)], [(0, 0, 2), (1, 1, 3)]]
    assert stepped[1::2] == [[(0, 2, 1)], [(0, 2, 2)], [(0, 2, 3), (1, 3, 1)]]
    assert [optimizer.state[weight]["step"].item() for weight in weights] == [2, 3, 3, 1]

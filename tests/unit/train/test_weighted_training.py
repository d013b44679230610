"""Runs on rows with `loss_weights`: the mean by weight over a whole step, fused or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from train_kit import Rows, make_config, make_rows, train

from swiftfp8.data.collator import Collator
from swiftfp8.loss_plan import LossPlan
from swiftfp8.train.metrics import read_log

FUSED = LossPlan(fused=True, reason="a test")


def weighted_rows(scale=1.0):
    rows = make_rows(8, evaluation=3)

    def weigh(part):
        return [
            {**row, "loss_weights": [scale * (0.2 + (k % 5)) for k in range(len(row["labels"]))]}
            for row in part
        ]

    return Rows(train=weigh(rows.train), eval=weigh(rows.eval), collator=Collator(pad_id=0))


def losses(folder, rows, *, weights=None, batch=4, accumulate=1, **plan):
    config = make_config(
        max_steps=4,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulate,
        data={"loss_weights": {"reasoning": 0.5} if weights is None else weights},
        train={"eval_steps": 2},
    )
    train(folder, config, rows=rows, **plan)
    log = read_log(folder)
    names = ("loss", "eval_loss")
    return [line[name] for line in log for name in names if name in line]


def test_fused_and_plain_losses_agree_however_a_step_is_divided(tmp_path):
    plain = losses(tmp_path / "plain", weighted_rows())
    assert len(plain) == 6
    fused = losses(tmp_path / "fused", weighted_rows(), loss=FUSED)
    divided = losses(tmp_path / "divided", weighted_rows(), batch=1, accumulate=4, loss=FUSED)
    small = losses(tmp_path / "small", weighted_rows(scale=1e-3), batch=2, accumulate=2)
    for other in (fused, divided, small):
        assert other == pytest.approx(plain, rel=1e-4)
    unweighted = losses(tmp_path / "none", replace_weights(weighted_rows()), weights={})
    assert unweighted != pytest.approx(plain, rel=1e-3)


def replace_weights(rows):
    def strip(part):
        return [{k: v for k, v in row.items() if k != "loss_weights"} for row in part]

    return replace(rows, train=strip(rows.train), eval=strip(rows.eval))

"""Training on packs: the same steps as on rows, right counts, exact resume."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from train_kit import Rows, make_config, make_model, make_rows, pad
from train_kit import train as train_model

from swiftfp8.data.packing import PackCollator, pack_rows
from swiftfp8.data.token_rows import TokenRows
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.train.metrics import Meter, read_log
from swiftfp8.train.trainer import run_training


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def train(run_dir, config, *, fp8: bool = False, **options):
    """As a loaded model is: without a key/value cache."""
    model, plan = make_model(fp8=fp8)
    model.config.use_cache = False
    return train_model(run_dir, config, model=(model, plan), **options)


def make_packs(count: int = 24, evaluation: int = 6, seed: int = 3) -> tuple[Rows, Rows]:
    """The same rows packed and as they are."""
    plain = make_rows(count, evaluation)

    def packed(rows):
        arrays = [
            tuple(np.array(row[key], dtype=np.int32) for key in ("input_ids", "labels"))
            for row in rows
        ]
        return pack_rows(TokenRows.of(arrays), 64, seed=seed)

    collator = PackCollator(token_multiple=16)
    return Rows(train=packed(plain.train), eval=packed(plain.eval), collator=collator), plain


@pytest.mark.parametrize("fp8", [False, True])
def test_a_step_on_packs_is_a_step_on_their_rows(tmp_path, fp8):
    packs, plain = make_packs()
    options = {"max_steps": 1, "learning_rate": 1e-3, "train": {"eval_steps": 1}}
    for name, rows, packing in (("rows", plain, False), ("packs", packs, True)):
        # all rows in one optimizer step, in either layout
        config = make_config(
            **options, per_device_train_batch_size=len(rows.train), packing=packing
        )
        train(tmp_path / name, config, rows=rows, fp8=fp8)
    (one, ev), (two, ev2) = read_log(tmp_path / "rows"), read_log(tmp_path / "packs")
    # FP32 sums in another order; under FP8 activations share one scale with others
    tolerance = 5e-3 if fp8 else 1e-5
    assert two["loss"] == pytest.approx(one["loss"], rel=tolerance)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=10 * tolerance)
    assert ev2["eval_loss"] == pytest.approx(ev["eval_loss"], rel=tolerance)


def test_packs_are_what_steps_and_epochs_count_and_filling_is_no_token(tmp_path, monkeypatch):
    packs, plain = make_packs()
    counted = []
    done = Meter.step_done
    monkeypatch.setattr(
        Meter, "step_done", lambda self, loss, n, **_: (counted.append(n), done(self, loss, n))
    )
    config = make_config(max_steps=-1, num_train_epochs=2.0, packing=True)
    result, _ = train(tmp_path, config, rows=packs)
    assert result.steps == 2 * math.ceil(len(packs.train) / 2)
    assert sum(counted) == 2 * sum(len(row["input_ids"]) for row in plain.train)
    assert read_log(tmp_path)[-1]["epoch"] == 2.0


def test_a_resumed_run_sees_the_same_packs(tmp_path):
    constant = {"lr_scheduler_type": "constant"}  # a cosine would see where the run is to end
    config = make_config(max_steps=6, packing=True, optim=constant)
    train(tmp_path / "whole", config, rows=make_packs()[0])
    part = make_config(max_steps=3, packing=True, optim=constant)
    train(tmp_path / "parts", part, rows=make_packs()[0])
    _, shown = train(
        tmp_path / "parts", config, rows=make_packs()[0], resume=tmp_path / "parts/checkpoint-3"
    )
    whole, parts = ([line["loss"] for line in read_log(tmp_path / n) if "loss" in line]
                    for n in ("whole", "parts"))  # fmt: skip
    assert whole[3:] == parts[3:]
    assert "WARNING" not in shown
    _, shown = train(
        tmp_path / "parts",
        make_config(max_steps=8),
        rows=make_packs()[1],
        resume=tmp_path / "parts/checkpoint-6",
    )
    assert "packing True -> False" in shown


def test_a_model_whose_rows_see_each_other_is_refused_before_the_first_step(tmp_path):
    model, plan = make_model()
    model.config.use_cache = False
    llama = model.get_base_model().model
    plain = llama.forward
    llama.forward = lambda *args, position_ids=None, **kwargs: plain(*args, **kwargs)
    with pytest.raises(SwiftFP8Error, match="packed rows see each other"):
        run_training(model, None, make_packs()[0], plan, make_config(packing=True), tmp_path)
    assert not read_log(tmp_path)
    # unpacked, the same model is no problem
    config = make_config(max_steps=1)
    run_training(model, None, Rows(train=make_rows().train, eval=None, collator=pad), plan, config,
                 tmp_path)  # fmt: skip

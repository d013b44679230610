"""The average of trained weights: its value, who sees it, and an exact resume."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from train_kit import make_config, make_model, make_rows, train

from swiftfp8.train.average import WeightAverage
from swiftfp8.train.metrics import read_log


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def job(decay: float = 0.5, **options):
    train_options = {"save_steps": 3, "save_total_limit": 5, "ema_decay": decay}
    return make_config(max_steps=6, learning_rate=1e-2, train=train_options, **options)


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_the_average_is_saved_and_a_resume_is_exact(tmp_path, monkeypatch, tuner):
    seen: list[list[torch.Tensor]] = []
    update = WeightAverage.on_step_end

    def record(self, *args, **kwargs):
        seen.append([weight.detach().clone() for weight in self._weights])
        update(self, *args, **kwargs)

    model, plan = make_model(tuner)
    first = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    monkeypatch.setattr(WeightAverage, "on_step_end", record)
    train(tmp_path / "whole", job(), tuner=tuner, model=(model, plan), rows=make_rows(8, 4))
    monkeypatch.setattr(WeightAverage, "on_step_end", update)
    expected = first
    for step, weights in enumerate(seen, 1):
        decay = min(0.5, (1 + step) / (10 + step))
        expected = [decay * a + (1 - decay) * w for a, w in zip(expected, weights, strict=True)]
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    saved = load_file(next((tmp_path / "whole" / "last").glob("*model.safetensors")))
    for name, value in zip(names, expected, strict=True):
        stored = saved[name.replace(".default.", ".")]
        torch.testing.assert_close(stored, value, rtol=1e-4, atol=1e-6)
    # What is trained on is not the average.
    after = [p.detach() for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(after, seen[-1], strict=True))
    shutil.copytree(tmp_path / "whole", tmp_path / "again", symlinks=True)
    start = tmp_path / "again" / "checkpoint-3"
    train(tmp_path / "again", job(), tuner=tuner, resume=start, rows=make_rows(8, 4))
    keys = ("loss", "eval_loss")
    whole, again = (
        [[x.get(k) for k in keys] for x in read_log(tmp_path / n)] for n in ("whole", "again")
    )
    assert whole == again


def test_training_is_the_same_and_evaluation_another(tmp_path):
    for name, decay in (("with", 0.5), ("without", 0.0)):
        train(tmp_path / name, job(decay), rows=make_rows(8, 4))
    logs = [read_log(tmp_path / name) for name in ("with", "without")]
    losses, evaluations = (
        [[x[key] for x in log if key in x] for log in logs] for key in ("loss", "eval_loss")
    )
    assert losses[0] == losses[1]
    assert evaluations[0] != evaluations[1]


def test_a_resume_may_begin_or_drop_an_average_and_says_so(tmp_path):
    rows = make_rows(8)
    train(tmp_path / "plain", job(0.0), rows=rows)
    start = tmp_path / "plain" / "checkpoint-3"
    _, shown = train(tmp_path / "plain", job(0.5), rows=rows, resume=start)
    assert "has no average of weights" in shown and "train.ema_decay 0.0 -> 0.5" in shown
    train(tmp_path / "averaged", job(0.5), rows=rows)
    whole = [x["loss"] for x in read_log(tmp_path / "averaged")]
    start = tmp_path / "averaged" / "checkpoint-3"
    _, shown = train(tmp_path / "averaged", job(0.0), rows=rows, resume=start)
    assert "is not kept up" in shown
    assert [x["loss"] for x in read_log(tmp_path / "averaged")] == whole

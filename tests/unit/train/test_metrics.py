from __future__ import annotations

import importlib.util
import json
import time

import pytest
from model_kit import plan_for, tiny_llama

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.train.flops import flops_per_token, peak_flops
from swiftfp8.train.metrics import Meter, Progress, RunLog, read_log, require_reporters


def meter(**options) -> Meter:
    return Meter(**{"flops_per_token": 1e6, "peak_flops": None, "device": "cpu", **options})


def test_lines_beyond_the_resumed_step_are_dropped_and_the_rest_kept(tmp_path):
    log = RunLog(tmp_path)
    for step in range(1, 6):
        log.append({"step": step, "loss": step / 3})
    log.close()
    with (tmp_path / "logging.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    log = RunLog(tmp_path)
    log.drop_after(3)
    log.append({"step": 4, "loss": 9.0})
    log.close()
    lines = read_log(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["loss"] == 1 / 3  # every digit survives the rewriting
    assert lines[3]["loss"] == 9.0


def test_each_line_can_be_read_at_once_and_is_strict_json(tmp_path):
    log = RunLog(tmp_path)
    log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    text = (tmp_path / "logging.jsonl").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads(text, parse_constant=refuse)
    assert line == {"step": 1, "loss": None, "grad_norm": None, "mfu": None}
    log.close()


def test_a_window_is_the_mean_over_its_steps():
    m = meter(peak_flops=1e12)
    m.begin()
    m.step_done(4.0, 100)
    m.step_done(2.0, 300)
    m.progress.window_seconds = 2.0
    values = m.close_window()
    assert values["loss"] == 3.0
    assert values["tokens_per_second"] == 200.0
    assert values["mfu"] == pytest.approx(200.0 * 1e6 / 1e12)
    m.step_done(1.0, 10)
    assert m.close_window()["loss"] == 1.0


def test_waiting_is_counted_by_step_and_begins_anew_with_each_line():
    one = meter()
    with one.waiting():
        time.sleep(0.05)
    one.step_done(1.0, 10)
    one.step_done(1.0, 10)
    assert one.close_window()["data_wait_ms"] >= 25
    one.step_done(1.0, 10)
    assert one.close_window()["data_wait_ms"] == 0


def test_mfu_is_unknown_without_a_peak():
    assert meter().mfu(100.0) is None


def test_a_pause_does_not_count():
    m = meter()
    m.begin()
    m.step_done(1.0, 10)
    with m.paused():
        time.sleep(0.2)
    m.step_done(1.0, 10)
    assert m.progress.steady_seconds < 0.1  # the sleep alone is twice that


def test_progress_survives_json():
    progress = Progress(window_loss=1 / 3, best_loss=0.1, best_step=7, elapsed=12.5)
    assert Progress.from_dict(json.loads(json.dumps(progress.to_dict()))) == progress


@pytest.mark.parametrize(("tuner", "factor"), [("full", 6), ("lora", 4)])
def test_flops_of_a_token(tuner, factor):
    plan = plan_for(tiny_llama(hidden=64), recipe=None, backend=None, tuner=tuner, rank=8)
    # Two layers: q and o 64x64, k and v 32x64, gate, up and down 128x64; the head 256x64.
    shapes = 2 * [(64, 64), (64, 64), (32, 64), (32, 64), (128, 64), (128, 64), (64, 128)]
    base = sum(a * b for a, b in shapes) + 256 * 64
    adapter = sum(a + b for a, b in shapes) * 8 * 6 if tuner == "lora" else 0
    assert flops_per_token(plan) == factor * base + adapter


def test_peaks_go_by_the_most_specific_name():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA A10G") == 70e12
    assert peak_flops("NVIDIA GB200") == 2500e12
    assert peak_flops("Unheard-of 9000") is None


def test_a_missing_reporter_is_found_before_training(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SwiftFP8Error) as caught:
        require_reporters(["wandb", "swanlab", "comet"])
    text = str(caught.value)
    assert "pip install wandb" in text
    assert "pip install swanlab" in text
    assert "comet" in text
    assert caught.value.exit_code == 2
    require_reporters([])
    require_reporters(["none"])

"""Runs on a stream: a resumed one sees the rows of an uninterrupted one, and stops at a bad row."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time

import pytest
from train_kit import VOCAB, Rows, make_config, make_model, train

from swiftfp8.config.paths import assets_dir
from swiftfp8.data.dataset import load_datasets
from swiftfp8.data.stream import StreamCollator
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.train import batches, metrics
from swiftfp8.train.loop import FP8Trainer
from swiftfp8.train.metrics import read_log


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets_dir() / "tiny")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"instruction": f"q {k}", "output": f"answer {k} " * (k % 7 + 1)} for k in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job(path, save_steps=4, **options):
    data = {"streaming": True, "shuffle_buffer": 16, "eval_rows": 4, **options.pop("data", {})}
    base = {"dataset": [str(path)], "max_length": 64, "max_steps": 9, "data": data}
    return make_config(
        **{**base, "gradient_accumulation_steps": 2, **options},
        train={"save_steps": save_steps, "eval_steps": 4, "save_total_limit": 9},
    )


def run(folder, config, tokenizer, resume=None, dropout=0.2):
    loaded = load_datasets(config, tokenizer, 8)
    collate = loaded.collator.inner

    def small(rows):  # ids that the tiny model knows
        batch = collate(rows)
        batch["input_ids"] %= VOCAB
        batch["labels"][batch["labels"] >= 0] %= VOCAB
        return batch

    small.flatten = False
    rows = Rows(train=loaded.train, eval=loaded.eval, collator=StreamCollator(inner=small))
    model, plan = make_model(dropout=dropout)
    model.config.use_cache = False
    return train(folder, config, rows=rows, resume=resume, model=(model, plan))


def curve(folder):
    names = ("step", "epoch", "loss", "eval_loss", "grad_norm")
    return [{name: line.get(name) for name in names} for line in read_log(folder)]


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packs"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, path, tokenizer, packing):
    config = job(path, packing=packing)
    run(tmp_path / "whole", config, tokenizer)
    whole = curve(tmp_path / "whole")
    assert whole[-1]["step"] == 9
    saved = json.loads((tmp_path / "whole" / "checkpoint-4" / "swiftfp8.json").read_text())
    assert saved["data"]["streaming"] and saved["data"][batches.STREAM]["taken"] > 0
    for step in (4, 8):
        folder = tmp_path / f"from-{step}"
        _, shown = run(folder, config, tokenizer, tmp_path / "whole" / f"checkpoint-{step}")
        assert "WARNING" not in shown
        assert curve(folder) == [line for line in whole if line["step"] > step]


def test_passes_are_counted_and_a_larger_batch_goes_on_at_the_same_row(tmp_path, path, tokenizer):
    config = job(path, max_steps=20)
    run(tmp_path / "whole", config, tokenizer)
    assert [line["epoch"] for line in curve(tmp_path / "whole")][-1] == 1  # 80 rows of 56
    larger = job(path, max_steps=6, gradient_accumulation_steps=3)
    _, shown = run(tmp_path / "more", larger, tokenizer, tmp_path / "whole" / "checkpoint-4")
    assert "is not read as before" not in shown
    other = job(path, max_steps=6, data={"shuffle_buffer": 8})
    _, shown = run(tmp_path / "other", other, tokenizer, tmp_path / "whole" / "checkpoint-4")
    assert "is not read as before (shuffle_buffer 16 -> 8)" in shown


def test_a_bad_row_ends_the_run_with_its_line_and_what_was_saved(tmp_path, path, tokenizer):
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*rows * 5, "{\n"]))
    with pytest.raises(SwiftFP8Error, match="malformed JSON") as caught:
        run(tmp_path / "run", job(path, max_steps=200), tokenizer)
    assert caught.value.where == f"{path}:301"
    assert (tmp_path / "run" / "last").exists()
    rows[-1] = "\n"
    path.write_text("".join(rows * 6))
    mended = job(path, max_steps=80)
    result, shown = run(tmp_path / "run", mended, tokenizer, tmp_path / "run", dropout=0.0)
    assert result.steps == 80 and "resuming at step 7" in shown


def test_steps_before_a_bad_row_are_saved_and_gone_on_with(tmp_path, path, tokenizer):
    rows = path.read_text().splitlines(keepends=True)
    # 28 steps and 4 micro-batches
    config = job(path, gradient_accumulation_steps=5, save_steps=6, max_steps=32)
    path.write_text("".join([*rows * 5, "{\n"]))
    with pytest.raises(RunFailed, match="broke off after step 28: 1 bad row") as caught:
        run(tmp_path / "run", config, tokenizer)
    assert caught.value.where == f"{path}:301"
    assert "data.on_bad_row=skip; the newest checkpoint is checkpoint-28" in caught.value.fix
    assert f"resume_from_checkpoint={tmp_path / 'run'}" in caught.value.fix
    path.write_text("".join([*rows * 5, "\n", *rows]))
    _, shown = run(tmp_path / "run", config, tokenizer, tmp_path / "run")
    assert "resuming at step 28" in shown
    run(tmp_path / "whole", config, tokenizer)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def losses(folder):
    return [line["loss"] for line in curve(folder) if line["loss"] is not None]


def test_a_fault_before_the_first_step_is_the_users_mistake(tmp_path, path, tokenizer):
    path.write_text(path.read_text() * 6 + "{\n")
    with pytest.raises(SwiftFP8Error, match="1 bad row") as caught:
        run(tmp_path / "run", job(path, data={"shuffle_buffer": 1000}), tokenizer)
    assert caught.value.exit_code == 2
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_file_that_is_gone_saves_the_steps_before(tmp_path, path, tokenizer, monkeypatch):
    more = tmp_path / "more.jsonl"
    more.write_text(path.read_text())
    config = job(path, dataset=[str(path), str(more)], max_steps=200, save_steps=20)
    loaded = load_datasets

    def lose(*args):
        data = loaded(*args)
        more.unlink()
        return data

    monkeypatch.setattr("test_streamed_training.load_datasets", lose)
    with pytest.raises(RunFailed, match=r"can't be read: .*No such file") as caught:
        run(tmp_path / "run", config, tokenizer)
    assert caught.value.where == str(more)
    assert "checkpoint-12; resume with" in caught.value.fix


def test_a_killed_reader_saves_the_steps_before_and_hints_at_memory(
    tmp_path, path, tokenizer, monkeypatch
):
    arrived = FP8Trainer._arrived

    def kill(self, batch):
        if self.state.global_step == 3:
            (reader,) = multiprocessing.active_children()
            reader.kill()
            time.sleep(5)  # cut short: torch raises in the handler of SIGCHLD
        return arrived(self, batch)

    monkeypatch.setattr(FP8Trainer, "_arrived", kill)
    with pytest.raises(RunFailed, match=r"no memory left .*killed by signal") as caught:
        run(tmp_path / "run", job(path), tokenizer)
    assert "data.shuffle_buffer" in caught.value.fix and "checkpoint-3" in caught.value.fix


def test_a_reader_killed_in_mid_step_lets_the_step_end_and_saves_it(
    tmp_path, path, tokenizer, monkeypatch
):
    step_done = metrics.Meter.step_done

    def kill(self, *args, **kwargs):
        step_done(self, *args, **kwargs)
        if self._session_steps == 3:
            (reader,) = multiprocessing.active_children()
            reader.kill()
            time.sleep(1)  # or until the signal of its death came

    run(tmp_path / "whole", job(path), tokenizer)
    handler = signal.getsignal(signal.SIGCHLD)
    with monkeypatch.context() as patched:
        patched.setattr(metrics.Meter, "step_done", kill)
        with pytest.raises(RunFailed, match=r"no memory left .*killed by signal") as caught:
            run(tmp_path / "run", job(path), tokenizer)
    assert "checkpoint-3; resume with" in caught.value.fix
    assert signal.getsignal(signal.SIGCHLD) == handler, "PyTorch's is in its place again"
    run(tmp_path / "run", job(path), tokenizer, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_ctrl_c_saves_the_place(tmp_path, path, tokenizer, monkeypatch):
    config = job(path)
    run(tmp_path / "whole", config, tokenizer)
    step_done = metrics.Meter.step_done

    def interrupt(self, *args, **kwargs):
        step_done(self, *args, **kwargs)
        if self._session_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(metrics.Meter, "step_done", interrupt)
        result, _ = run(tmp_path / "run", config, tokenizer)
    assert result.interrupted and result.steps == 3
    run(tmp_path / "run", config, tokenizer, tmp_path / "run")
    losses = [line["loss"] for line in curve(tmp_path / "whole") if line["loss"] is not None]
    assert [x["loss"] for x in curve(tmp_path / "run") if x["loss"] is not None] == losses


def test_rows_left_out_are_counted_once_however_often_the_run_is_resumed(tmp_path, path, tokenizer):
    rows = path.read_text().splitlines(keepends=True)
    long = json.dumps({"instruction": "q", "output": "far too long " * 99}) + "\n"
    path.write_text(
        "".join([*rows[:30], "{\n", '{"a": 1}\n', *rows[30:50], long, "{\n", *rows[50:]])
    )
    skip = {"on_bad_row": "skip", "truncation": "delete"}
    config = job(path, data=skip, max_steps=20, save_steps=2)
    whole, shown = run(tmp_path / "whole", config, tokenizer)
    counted = json.loads((tmp_path / "whole" / "result.json").read_text())["left_out"]
    assert counted == whole.left_out and sum(counted.values()) > 4, "two passes over four rows"
    assert counted["longer than max_length=64"] == 1
    for reason, number in counted.items():
        assert f"{number} x {reason}" in " ".join(shown.split())
    for step in (2, 8, 14):  # in the first block, and in blocks with and behind those rows
        start = tmp_path / "whole" / f"checkpoint-{step}"
        resumed, _ = run(tmp_path / f"from-{step}", config, tokenizer, start)
        assert resumed.left_out == counted


def test_a_relative_path_is_the_file_that_resolved_yaml_names(path, monkeypatch):
    """Or every resume by resolved.yaml would warn of other data."""
    monkeypatch.chdir(path.parent)
    near, far = (batches.data_shape(None, job(name)) for name in (path.name, path))
    assert near == far

"""A resume that is refused or fails before its first step leaves the run as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftfp8 import pipeline
from swiftfp8.config.compose import compose_config
from swiftfp8.data import streaming
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.train.checkpoint import why_not_whole
from swiftfp8.train.damage import find_damaged


def write_rows(path: Path, count: int, *, bad: str = "") -> Path:
    rows = [
        {"instruction": f"What is {k} plus 1?", "input": "", "output": f"It is {k + 1}."}
        for k in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + bad)
    return path


def train(folder: Path, *options: str) -> Path:
    base = [
        "model_type=tiny",
        f"output_dir={folder}",
        "dtype=bf16",
        "max_length=128",
        "train.images=false",
        "train.save_steps=2",
        "train.logging_steps=1",
        "data.streaming=true",
        "data.shuffle=false",
        "data.shuffle_buffer=4",
        "per_device_train_batch_size=2",
        "gradient_accumulation_steps=1",
    ]
    return pipeline.train(compose_config(None, [*base, *options])).run_dir


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and link of a run by its path, but for the lock's process id."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = str(path.readlink()).encode()
        elif path.is_file() and name != ".lock":
            found[name] = path.read_bytes()
    return found


@pytest.fixture
def run(tmp_path) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", 40)
    return train(tmp_path, "run_name=run", f"dataset=[{rows}]", "max_steps=4")


def resume(run: Path, start: Path, *rows: Path) -> None:
    names = ",".join(map(str, rows))
    train(run.parent, f"dataset=[{names}]", "max_steps=6", f"resume_from_checkpoint={start}")


def test_another_number_of_streams_is_refused_and_nothing_is_touched(run, tmp_path):
    before = contents(run)
    more = write_rows(tmp_path / "more.jsonl", 9)
    with pytest.raises(SwiftFP8Error, match="trained on a stream of 1 data sets"):
        resume(run, run / "checkpoint-2", tmp_path / "rows.jsonl", more)
    assert contents(run) == before


def test_a_stream_that_fails_on_its_first_rows_leaves_the_run_alone(run, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "_PROBED", 3)  # which is checked before anything is loaded
    before = contents(run)
    assert {"result.json", "checkpoint-4/swiftfp8.json"} <= before.keys()
    cut = write_rows(tmp_path / "cut.jsonl", 5, bad="{\n")
    with pytest.raises(SwiftFP8Error, match="malformed JSON"):
        resume(run, run / "checkpoint-2", cut)
    assert contents(run) == before


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_damaged_checkpoint_leaves_the_run_alone(run, tmp_path, name):
    damaged = run / "checkpoint-4" / name
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    before = contents(run)
    other = write_rows(tmp_path / "other.jsonl", 40)
    with pytest.raises(RunFailed) as caught:
        resume(run, run, other)
    assert caught.value.what == f"the checkpoint is damaged: {name} can't be read"
    assert str(caught.value.fix).endswith(f"resume_from_checkpoint={run / 'checkpoint-2'}")
    assert contents(run) == before


@pytest.mark.parametrize("text", ["[]", '{"global_step": "4"}', '{"odd": 1}', "{"])
def test_a_trainer_state_of_another_shape_is_damage(run, tmp_path, text):
    damaged = run / "checkpoint-2" / "trainer_state.json"
    damaged.write_text(text.ljust(damaged.stat().st_size))
    assert find_damaged(run / "checkpoint-4") is None
    with pytest.raises(RunFailed, match=r"trainer_state.json can't be read") as caught:
        resume(run, run / "checkpoint-2", tmp_path / "rows.jsonl")
    assert "no older whole checkpoint" in str(caught.value.fix)


@pytest.mark.parametrize("key", ["step", "progress", "data"])
def test_a_manifest_of_another_shape_is_damage(run, tmp_path, key):
    path = run / "checkpoint-4" / "swiftfp8.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: "odd"}))
    with pytest.raises(RunFailed, match=r"swiftfp8.json can't be read"):
        resume(run, run, tmp_path / "rows.jsonl")
    path.write_text('{"files": []}')
    assert why_not_whole(path.parent) == "swiftfp8.json lists no files"


def test_an_accepted_resume_with_other_rows_keeps_the_records_and_goes_on(run, tmp_path):
    told = (run / "resolved.yaml").read_bytes()
    resume(run, run / "checkpoint-2", write_rows(tmp_path / "other.jsonl", 40))
    assert (run / "sessions" / "1" / "resolved.yaml").read_bytes() == told
    assert "other.jsonl" in (run / "resolved.yaml").read_text()
    lines = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]

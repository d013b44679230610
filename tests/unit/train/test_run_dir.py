from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from train_kit import make_config

from swiftfp8.config.compose import read_resolved
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.train.checkpoint import write_checkpoint
from swiftfp8.train.run_dir import (
    confirm_run,
    describe_environment,
    discard_run,
    release_run,
    start_run,
)
from swiftfp8.train.run_place import check_run_directory, resume_command, unused_name

NOW = datetime(2024, 5, 6, 7, 8, 9)


def begin(tmp_path: Path, **options):
    config = make_config(output_dir=str(tmp_path / "output"), **options)
    run_dir = start_run(config, "Qwen/Qwen3-0.6B", now=NOW)
    return run_dir


def save(run_dir: Path, step: int) -> Path:
    return write_checkpoint(run_dir, step, lambda folder: (folder / "x").touch(), {})


def test_the_name_says_model_task_and_time(tmp_path):
    first = begin(tmp_path)
    second = begin(tmp_path)  # within the same second, as in a sweep
    assert first == tmp_path / "output" / "Qwen-Qwen3-0.6B-sft-20240506-070809"
    assert second.name == first.name + "-2"


def test_all_that_the_run_was_told_is_written(tmp_path):
    config = make_config(output_dir=str(tmp_path), run_name="r", seed=11)
    composed = SimpleNamespace(config=config, overrides=("seed=11", "train.save_steps=0"))
    run_dir = start_run(composed, "m", plan={"a": 1}, precision_report={"b": 2})
    assert "seed: 11" in (run_dir / "resolved.yaml").read_text()
    assert (run_dir / "overrides.txt").read_text() == "seed=11\ntrain.save_steps=0\n"
    assert json.loads((run_dir / "plan.json").read_text()) == {"a": 1}
    assert json.loads((run_dir / "precision_report.json").read_text()) == {"b": 2}
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["seed"] == 11
    assert environment["versions"]["torch"]
    assert not list(run_dir.glob(".tmp-*"))


def test_no_secret_reaches_the_environment_file(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    monkeypatch.setattr(sys, "argv", ["swiftfp8", "train", "hub_token=hf_argument", "seed=1"])
    text = json.dumps(describe_environment(1))
    assert "hf_environment" not in text
    assert "hf_argument" not in text
    assert "seed=1" in text


def test_a_run_in_use_is_refused_even_from_another_process(tmp_path):
    run_dir = begin(tmp_path, run_name="mine")
    with pytest.raises(SwiftFP8Error, match="in use") as caught:
        begin(tmp_path, run_name="mine")
    assert caught.value.exit_code == 2
    code = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from swiftfp8.errors import SwiftFP8Error
        from swiftfp8.train import run_place
        try:
            run_place._lock(Path({str(run_dir)!r}))
        except SwiftFP8Error as error:
            print(error)
            sys.exit(error.exit_code)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "in use by process" in done.stdout


def test_finished_and_unfinished_runs_are_refused_and_name_the_way_on(tmp_path):
    run_dir = begin(tmp_path, run_name="mine")
    save(run_dir, 3)
    release_run(run_dir)
    with pytest.raises(SwiftFP8Error, match="an unfinished run") as caught:
        begin(tmp_path, run_name="mine")
    assert "resume_from_checkpoint=" in str(caught.value)
    (run_dir / "result.json").write_text("{}")
    with pytest.raises(SwiftFP8Error, match="a finished run"):
        begin(tmp_path, run_name="mine")


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path):
    other = tmp_path / "output" / "mine"
    other.mkdir(parents=True)
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(SwiftFP8Error, match="something else"):
        begin(tmp_path, run_name="mine")
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../x", "has a / in it"),
        ("a/b", "has a / in it"),
        ("..", "made of dots"),
        ("", "is empty"),
        (" ", "is empty"),
        ("a" * 300, "takes 300 bytes"),
        ("ä" * 150, "takes 300 bytes"),
        ("a${b", "has ${"),
        ("a\0b", "can't be shown"),
    ],
)
@pytest.mark.parametrize("begins", [start_run, lambda config, _: check_run_directory(config)])
def test_a_name_that_no_directory_can_have_is_refused(tmp_path, begins, name, why):
    (tmp_path / "output").mkdir()
    config = make_config(output_dir=str(tmp_path / "output"), run_name=name)
    with pytest.raises(SwiftFP8Error, match=re.escape(why)) as caught:
        begins(config, "tiny")
    assert (caught.value.where, caught.value.exit_code) == ("run_name", 2) and caught.value.fix
    assert not list((tmp_path / "output").iterdir())


@pytest.mark.parametrize("begins", [start_run, lambda config, _: check_run_directory(config)])
def test_a_link_to_nothing_is_no_run_directory(tmp_path, begins):
    (tmp_path / "link").symlink_to("gone")
    for options in (
        {"output_dir": str(tmp_path), "run_name": "link"},
        {"output_dir": str(tmp_path / "link" / "below"), "run_name": None},
    ):
        with pytest.raises(SwiftFP8Error, match="a link to what is not there: gone") as caught:
            begins(make_config(**options), "tiny")
        assert caught.value.where == str(tmp_path / "link")


def test_a_resume_says_that_another_name_is_not_used(tmp_path):
    run_dir = begin(tmp_path, run_name="mine")
    checkpoint = save(run_dir, 1)
    for resume in (run_dir, run_dir / "last", checkpoint):
        options = {"output_dir": str(tmp_path), "resume_from_checkpoint": str(resume)}
        said = unused_name(make_config(run_name="other", **options))
        assert said is not None and "run_name=other is not used" in said and str(run_dir) in said
        assert unused_name(make_config(run_name="mine", **options)) is None
        assert unused_name(make_config(**options)) is None
    alone = tmp_path / "alone" / "checkpoint-1"
    shutil.copytree(checkpoint, alone)
    options = {"output_dir": str(tmp_path), "resume_from_checkpoint": str(alone)}
    assert unused_name(make_config(run_name="other", **options)) is None


def test_what_would_be_refused_is_known_before_anything_is_made(tmp_path):
    config = make_config(output_dir=str(tmp_path / "output"), run_name="r")
    check_run_directory(config)
    assert list(tmp_path.iterdir()) == []
    run_dir = start_run(config, "m")
    with pytest.raises(SwiftFP8Error, match="in use by process"):
        check_run_directory(config)
    release_run(run_dir)
    check_run_directory(config)  # it died before its first checkpoint
    save(run_dir, 1)
    with pytest.raises(SwiftFP8Error, match="an unfinished run"):
        check_run_directory(config)
    (run_dir / "result.json").touch()
    with pytest.raises(SwiftFP8Error, match="a finished run") as caught:
        check_run_directory(config)
    assert f"swiftfp8 export run={run_dir}" in caught.value.fix
    assert "with a larger max_steps=" in caught.value.fix
    (run_dir / "export").mkdir()
    with pytest.raises(SwiftFP8Error) as caught:
        check_run_directory(config)
    assert f"use its export, {run_dir / 'export'}" in caught.value.fix
    with pytest.raises(SwiftFP8Error, match="cannot create a run directory"):
        check_run_directory(make_config(output_dir=str(run_dir / "resolved.yaml" / "below")))


def test_the_resolved_yaml_means_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows#1.jsonl").touch()
    (tmp_path / "base").mkdir()
    config = make_config(
        model="base", dataset=["rows#1.jsonl#5", "quickstart#3", "owner/name"], run_name="r"
    )
    run_dir = start_run(config, "m").absolute()
    monkeypatch.chdir("/")
    told = read_resolved(run_dir)
    assert told.model == str(tmp_path / "base") and told.output_dir == str(run_dir.parent)
    assert told.dataset == (f"{tmp_path}/rows#1.jsonl#5", "quickstart#3", "owner/name")


def test_a_run_that_died_before_its_first_checkpoint_may_begin_again(tmp_path):
    run_dir = begin(tmp_path, run_name="mine")
    (run_dir / "logging.jsonl").write_text('{"step": 1}\n')
    release_run(run_dir)
    assert begin(tmp_path, run_name="mine") == run_dir
    assert not (run_dir / "logging.jsonl").exists()


def test_resuming_reopens_the_same_directory(tmp_path):
    run_dir = begin(tmp_path)
    checkpoint = save(run_dir, 3)
    (run_dir / "result.json").write_text("{}")
    (run_dir / ".tmp-checkpoint-6").mkdir()
    release_run(run_dir)
    for where in (run_dir, checkpoint, run_dir / "last"):
        assert begin(tmp_path, resume_from_checkpoint=str(where)).resolve() == run_dir.resolve()
        release_run(run_dir)
    assert not (run_dir / ".tmp-checkpoint-6").exists()


def test_a_resumed_runs_files_change_only_once_it_is_known_to_fit(tmp_path):
    run_dir = begin(tmp_path, seed=1)
    save(run_dir, 3)
    release_run(run_dir)
    begin(tmp_path, seed=2, resume_from_checkpoint=str(run_dir))
    assert "seed: 1" in (run_dir / "resolved.yaml").read_text()
    release_run(run_dir)  # refused, say: what was to be written is forgotten
    confirm_run(run_dir)
    assert "seed: 1" in (run_dir / "resolved.yaml").read_text()
    begin(tmp_path, seed=2, resume_from_checkpoint=str(run_dir))
    confirm_run(run_dir)
    text = (run_dir / "resolved.yaml").read_text()
    assert "seed: 2" in text
    assert "resume_from_checkpoint: null" in text


def test_a_checkpoint_copied_out_of_its_run_begins_a_new_one(tmp_path):
    run_dir = begin(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copied = save(run_dir, 3).rename(elsewhere / "checkpoint-3")
    assert begin(tmp_path, resume_from_checkpoint=str(copied)).parent == tmp_path / "output"


def test_discard_removes_only_runs_in_which_nothing_was_trained(tmp_path):
    empty, trained = begin(tmp_path), begin(tmp_path)
    save(trained, 1)
    assert discard_run(empty)
    assert not empty.exists()
    assert not discard_run(trained)
    assert (trained / "checkpoint-1").is_dir()


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    config = replace(make_config(), output_dir=str(tmp_path / "file" / "output"))
    with pytest.raises(SwiftFP8Error) as caught:
        start_run(config, "m")
    assert not isinstance(caught.value, RunFailed)
    assert "output_dir" in str(caught.value)


def test_the_resume_command_survives_a_shell(tmp_path):
    run_dir = tmp_path / "my runs" / "a"
    assert f"'resume_from_checkpoint={run_dir}'" in resume_command(run_dir)


def test_a_resume_with_another_configuration_keeps_the_earlier_records(tmp_path):
    run_dir = begin(tmp_path, seed=1)
    save(run_dir, 3)
    (run_dir / "overrides.txt").write_text("seed=1\n")
    (run_dir / "precision_report.json").write_text("{}")
    first = {name: (run_dir / name).read_bytes() for name in ("resolved.yaml", "overrides.txt")}
    release_run(run_dir)
    begin(tmp_path, seed=1, resume_from_checkpoint=str(run_dir))
    confirm_run(run_dir)  # the same job: nothing is written anew
    release_run(run_dir)
    assert {name: (run_dir / name).read_bytes() for name in first} == first
    assert not (run_dir / "sessions").exists()
    for seed in (2, 3):
        begin(tmp_path, seed=seed, resume_from_checkpoint=str(run_dir))
        confirm_run(run_dir)
        release_run(run_dir)
    assert {name: (run_dir / "sessions" / "1" / name).read_bytes() for name in first} == first
    assert "seed: 2" in (run_dir / "sessions" / "2" / "resolved.yaml").read_text()
    assert "seed: 3" in (run_dir / "resolved.yaml").read_text()

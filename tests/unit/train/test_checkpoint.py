from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.train import checkpoint as store


def save(run_dir: Path, step: int, text: str = "weights") -> Path:
    def fill(folder: Path) -> None:
        (folder / "model.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "tokenizer.json").write_text("{}")

    return store.write_checkpoint(run_dir, step, fill, {"fingerprint": {"a": step}})


def names(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.iterdir()}


def test_a_written_checkpoint_is_whole_and_last(tmp_path):
    path = save(tmp_path, 5)
    assert store.why_not_whole(path) is None
    assert store.read_manifest(path)["fingerprint"] == {"a": 5}
    assert os.readlink(tmp_path / "last") == "checkpoint-5"
    assert names(tmp_path) == {"checkpoint-5", "last"}


def test_links_are_relative_and_follow_a_moved_run(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    store.link(run_dir, "best", save(run_dir, 5))
    store.link(run_dir, "best", save(run_dir, 6))
    moved = run_dir.rename(tmp_path / "moved")
    assert (moved / "best" / "model.txt").read_text() == "weights"
    assert store.find_resume(moved / "best").name == "checkpoint-6"
    store.link(moved, "best", None)
    assert not (moved / "best").is_symlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "model.txt").unlink(), "model.txt is missing"),
        (lambda path: (path / "model.txt").write_text("wei"), "3 bytes, not 7"),
        (lambda path: (path / "swiftfp8.json").unlink(), "swiftfp8.json is missing"),
        (lambda path: (path / "swiftfp8.json").write_text("{"), "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named_when_asked_for(tmp_path, damage, reason):
    save(tmp_path, 5)
    torn = save(tmp_path, 10)
    damage(torn)
    assert store.find_resume(tmp_path).name == "checkpoint-5"
    with pytest.raises(SwiftFP8Error, match=reason):
        store.find_resume(torn)
    shutil.rmtree(tmp_path / "checkpoint-5")
    with pytest.raises(SwiftFP8Error, match=f"checkpoint-10 is not whole, .*{reason}"):
        store.find_resume(tmp_path)


def test_newest_is_by_number_not_by_name(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 9)
    assert store.find_resume(tmp_path).name == "checkpoint-10"


@pytest.mark.parametrize("make", [False, True])
def test_nothing_to_resume_from_is_the_users_mistake(tmp_path, make):
    run_dir = tmp_path / "run"
    if make:
        run_dir.mkdir()
    with pytest.raises(SwiftFP8Error) as caught:
        store.find_resume(run_dir)
    assert caught.value.exit_code == 2


def test_rotation_keeps_best_last_and_the_newest(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    store.link(tmp_path, "best", tmp_path / "checkpoint-1")
    deleted = store.rotate(tmp_path, keep=1)
    assert [path.name for path in deleted] == ["checkpoint-2", "checkpoint-3"]
    assert names(tmp_path) == {"checkpoint-1", "checkpoint-4", "checkpoint-5", "best", "last"}


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    store.set_aside_after(tmp_path, 2)
    assert store.newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert (tmp_path / "superseded-checkpoint-6" / "model.txt").exists()


def torch_write_error() -> RuntimeError:
    """What torch.save raises where the device has no room."""
    try:
        torch.save({"x": torch.zeros(4096)}, "/dev/full")
    except RuntimeError as error:
        return error
    pytest.skip("/dev/full does not refuse torch.save here")


def test_a_disk_full_at_the_first_checkpoint_does_not_advise_to_resume(tmp_path):
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunFailed, match="no earlier checkpoint exists") as caught:
        store.write_checkpoint(tmp_path, 1, fill, {})
    assert "start the run again" in caught.value.fix
    assert names(tmp_path) == set()


@pytest.mark.parametrize("kind", ["system", "torch"])
def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_else(tmp_path, kind):
    save(tmp_path, 5)
    error = OSError(errno.ENOSPC, "No space left on device")
    if kind == "torch":
        error = torch_write_error()

    def fill(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise error

    with pytest.raises(RunFailed) as caught:
        store.write_checkpoint(tmp_path, 10, fill, {})
    text = str(caught.value)
    assert "checkpoint-10" in text
    assert "checkpoint-5 is intact" in text
    assert "make room" in text and "resume_from_checkpoint=" in text
    assert names(tmp_path) == {"checkpoint-5", "last"}
    assert os.readlink(tmp_path / "last") == "checkpoint-5"


def test_a_fault_of_the_program_is_not_taken_for_a_full_disk(tmp_path):
    def fill(folder: Path) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        store.write_checkpoint(tmp_path, 1, fill, {})
    assert names(tmp_path) == set()


def test_kill_9_in_the_middle_of_writing_leaves_no_checkpoint(tmp_path):
    save(tmp_path, 5)
    code = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from swiftfp8.train.checkpoint import write_checkpoint

        def fill(folder):
            (folder / "model.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

        write_checkpoint(Path({str(tmp_path)!r}), 10, fill, {{}})
    """)
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert store.find_resume(tmp_path).name == "checkpoint-5"
    assert not (tmp_path / "checkpoint-10").exists()
    store.clean_leftovers(tmp_path)
    assert names(tmp_path) == {"checkpoint-5", "last"}


def test_the_manifest_is_the_last_file_written(tmp_path):
    seen: list[bool] = []
    store.write_checkpoint(
        tmp_path, 1, lambda folder: seen.append((folder / store.MANIFEST).exists()), {}
    )
    assert seen == [False]
    assert json.loads((tmp_path / "checkpoint-1" / store.MANIFEST).read_text())["files"] == {}

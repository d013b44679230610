"""A directory appears whole or not at all."""

import errno
import os
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.export import staging
from swiftfp8.export.staging import staged

Which = Callable[[Path, Path], bool]


def never(source: Path, new: Path) -> bool:
    return False


def fill(target: Path, text: str = "new", **options: object) -> None:
    with staged(target, **{"overwrite": False, "needed_bytes": 0, **options}) as partial:
        assert not target.exists() or options
        (partial / "config.json").write_text(text)
        (partial / "export_report.json").write_text("{}")


def interrupt_rename(
    monkeypatch: pytest.MonkeyPatch, *, before: Which = never, after: Which = never
) -> None:
    """Ctrl-C just before, or just after, a rename (source, new name) that is meant."""
    rename = os.rename

    def interrupted(source: Path, new: Path) -> None:
        if before(Path(source), Path(new)):
            raise KeyboardInterrupt
        rename(source, new)
        if after(Path(source), Path(new)):
            raise KeyboardInterrupt

    monkeypatch.setattr(staging.os, "rename", interrupted)


def test_renamed_into_place(tmp_path: Path) -> None:
    fill(tmp_path / "a" / "b" / "export")
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["export"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), SwiftFP8Error("x")])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with (
        pytest.raises(type(error)),
        staged(tmp_path / "a" / "export", overwrite=False, needed_bytes=0) as partial,
    ):
        (partial / "half").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_existing_export_is_kept_unless_replaced(tmp_path: Path) -> None:
    target = tmp_path / "export"
    fill(target, "old")
    with pytest.raises(SwiftFP8Error, match="exists already"):
        fill(target)
    with (
        pytest.raises(ValueError, match="boom"),
        staged(target, overwrite=True, needed_bytes=0),
    ):
        raise ValueError("boom")
    assert (target / "config.json").read_text() == "old"
    fill(target, "new", overwrite=True)
    assert (target / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_ctrl_c_while_it_gets_its_name_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    fill(target, "old")
    interrupt_rename(
        monkeypatch, before=lambda source, new: new == target and ".partial-" in source.name
    )
    with pytest.raises(KeyboardInterrupt):
        fill(target, "new", overwrite=True)
    assert (target / "config.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_an_export_that_finished_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "export"
    with (
        pytest.raises(SwiftFP8Error, match="exists already"),
        staged(target, overwrite=False, needed_bytes=0),
    ):
        target.mkdir()
        (target / "config.json").write_text("the other's")
    assert (target / "config.json").read_text() == "the other's"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_ctrl_c_when_the_old_one_has_just_lost_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    fill(target, "old")
    interrupt_rename(monkeypatch, after=lambda source, new: ".old-" in new.name)
    with pytest.raises(KeyboardInterrupt):
        fill(target, "new", overwrite=True)
    assert (target / "config.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_an_old_export_that_can_not_get_its_name_back_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "export"
    fill(target, "old")
    interrupt_rename(monkeypatch, before=lambda source, new: new == target)
    with pytest.raises(RunFailed, match="could not get its name back") as caught:
        fill(target, "new", overwrite=True)
    (old,) = tmp_path.iterdir()
    assert caught.value.where == str(old)
    assert (old / "config.json").read_text() == "old"


def test_overwrite_spares_what_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(SwiftFP8Error, match="something else"):
        fill(tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_overwrite_spares_models_and_checkpoints_of_a_run(tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / name).write_text("trained for days")
    with pytest.raises(SwiftFP8Error, match="something else"):
        fill(checkpoint, overwrite=True)
    assert (checkpoint / name).read_text() == "trained for days"


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with staged(tmp_path / "export", overwrite=False, needed_bytes=0) as partial:
        (partial / "x").write_text("x")
    assert (tmp_path / "export" / "x").exists()


def test_no_space_is_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: usage(10**9, 0, 10**9))
    with pytest.raises(SwiftFP8Error, match="no disk space"):
        fill(tmp_path / "export", needed_bytes=10**9)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    with (
        pytest.raises(SwiftFP8Error, match="no disk space"),
        staged(tmp_path / "export", overwrite=False, needed_bytes=0),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_file_over_the_limit_is_explained_and_an_interruption(tmp_path: Path) -> None:
    error = OSError(errno.EFBIG, "File too large")
    assert staging.is_interruption(error)
    with (
        pytest.raises(SwiftFP8Error, match="ulimit -f"),
        staged(tmp_path / "export", overwrite=False, needed_bytes=0),
    ):
        raise error


def test_a_name_that_no_file_system_takes_is_refused_at_once(tmp_path: Path) -> None:
    staging.check_target(tmp_path / ("x" * 230), overwrite=False)
    with pytest.raises(SwiftFP8Error, match="too long: 232 bytes"):
        staging.check_target(tmp_path / ("ü" * 116), overwrite=False)

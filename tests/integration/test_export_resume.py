"""An interrupted export goes on where it stopped, and its result shows nothing of it."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from export_kit import save_model, save_tokenizer
from rich.console import Console
from test_export import save_adapter

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.export import checkpoint_io, journal
from swiftfp8.export.check import check_checkpoint
from swiftfp8.export.export import ExportContext, export_checkpoint
from swiftfp8.export.journal import JOURNAL_NAME
from swiftfp8.export.staging import staged

SMALL = ExportConfig(format="fp8_block", max_shard_size="300KB", verify=False)
OWN_FILES = {"README.md", "export_report.json"}  # they tell the time

KILLED = """
import sys, time
from pathlib import Path
from swiftfp8.config.schema import ExportConfig
from swiftfp8.export import checkpoint_io
from swiftfp8.export.export import export_checkpoint
write = checkpoint_io.CheckpointWriter.write
def slow(self, name, piece):
    time.sleep(0.1)
    return write(self, name, piece)
checkpoint_io.CheckpointWriter.write = slow
settings = ExportConfig(format="fp8_block", max_shard_size="300KB", verify=False)
export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), settings)
"""


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name not in OWN_FILES
    }


def partial_of(directory: Path) -> Path:
    (found,) = directory.glob("export.partial-*")
    return found


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
    """Raise at the n-th write of a tensor's piece."""
    write, count = checkpoint_io.CheckpointWriter.write, 0

    def counting(self: object, name: str, piece: object) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise error
        write(self, name, piece)

    monkeypatch.setattr(checkpoint_io.CheckpointWriter, "write", counting)


def half_done(
    base: Path, target: Path, settings: ExportConfig = SMALL, adapter: Path | None = None
) -> Path:
    """Interrupt an export by Ctrl-C half-way; the directory that is left."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 18, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(base, adapter, target, replace(settings, resume=True))
    return partial_of(target.parent)


def said(call: object) -> tuple[object, str]:
    out = io.StringIO()
    return call(ExportContext(console=Console(file=out, width=200))), out.getvalue()  # type: ignore[operator]


def test_a_killed_export_goes_on_and_is_equal_byte_for_byte(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base", "qwen3"))
    adapter = save_adapter(tmp_path / "adapter", "qwen3")
    whole = export_checkpoint(base, adapter, tmp_path / "whole", SMALL)
    target = tmp_path / "out" / "export"
    repository = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(base), str(adapter), str(target)],
        env={**os.environ, "PYTHONPATH": repository},
        stderr=subprocess.PIPE,
    ) as process:
        while len(list(tmp_path.glob(f"out/export.partial-*/{JOURNAL_NAME}"))) == 0 or (
            (partial_of(target.parent) / JOURNAL_NAME).read_text().count('"shard"') < 3
        ):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    left = partial_of(target.parent)
    assert not target.exists() and not (left / "config.json").exists()
    kept = {path.name: path.stat().st_ino for path in sorted(left.glob("*.safetensors"))[:3]}

    report, text = said(
        lambda context: export_checkpoint(
            base, adapter, target, replace(SMALL, resume=True), context
        )
    )
    assert "resuming: " in text
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    assert {name: (target / name).stat().st_ino for name in kept} == kept
    assert contents(target) == contents(tmp_path / "whole")
    assert report.reused >= 3 and report.layers == whole.layers  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["fp8_block", "compressed_tensors", "fp8", "bf16"])
def test_every_format_resumes(tmp_path: Path, name: str) -> None:
    settings = replace(SMALL, format=name)  # type: ignore[arg-type]
    base = save_model(tmp_path / "base", "llama")
    whole = export_checkpoint(base, None, tmp_path / "whole", settings)
    half_done(base, tmp_path / "export", settings)
    resumed = export_checkpoint(base, None, tmp_path / "export", replace(settings, resume=True))
    assert resumed.reused > 0
    assert resumed.layers == whole.layers
    assert contents(tmp_path / "export") == contents(tmp_path / "whole")


def test_a_weight_whose_scale_is_in_the_next_file_is_made_again(tmp_path: Path) -> None:
    """Interrupted between the two: the shard with the weight is kept, its scale is still due."""
    base = save_model(tmp_path / "base", "llama")
    settings = replace(SMALL, max_shard_size="1")  # one tensor a file
    whole = export_checkpoint(base, None, tmp_path / "whole", settings)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 12, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(base, None, tmp_path / "export", replace(settings, resume=True))
    resumed = export_checkpoint(base, None, tmp_path / "export", replace(settings, resume=True))
    assert 8 <= resumed.reused <= 11
    assert resumed.layers == whole.layers
    assert contents(tmp_path / "export") == contents(tmp_path / "whole")


def test_one_that_stopped_while_it_was_checked_writes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    base = save_model(tmp_path / "base", "llama")
    whole = export_checkpoint(base, None, tmp_path / "whole", SMALL)
    with monkeypatch.context() as patch:
        patch.setattr("swiftfp8.export.export.verify_directory", stop)
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(base, None, tmp_path / "export", replace(SMALL, resume=True))
    resumed = export_checkpoint(base, None, tmp_path / "export", replace(SMALL, resume=True))
    assert resumed.reused == whole.shards and resumed.layers == whole.layers
    assert contents(tmp_path / "export") == contents(tmp_path / "whole")


def test_ctrl_c_when_the_journal_is_gone_leaves_nothing_that_nobody_could_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    base = save_model(tmp_path / "base", "llama")
    monkeypatch.setattr("swiftfp8.export.staging._put_in_place", stop)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(base, None, tmp_path / "export", replace(SMALL, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_other_options_or_files_are_refused_by_name(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    target = tmp_path / "export"
    left = half_done(base, target)
    resume = replace(SMALL, resume=True)
    with pytest.raises(SwiftFP8Error) as error:
        export_checkpoint(base, None, target, replace(resume, exclude=["down_proj"]))
    assert 'export.exclude was [], is ["down_proj"]' in error.value.what
    assert error.value.where == str(left)
    with pytest.raises(SwiftFP8Error, match=r"export.format was \"fp8_block\", is \"bf16\""):
        export_checkpoint(base, None, target, replace(resume, format="bf16"))
    with pytest.raises(SwiftFP8Error, match=r"the adapter's adapter_config.json has changed"):
        export_checkpoint(base, save_adapter(tmp_path / "adapter", "llama"), target, resume)
    os.utime(base / "model.safetensors", (1, 1))
    with pytest.raises(SwiftFP8Error, match=r"the model's model.safetensors has changed"):
        export_checkpoint(base, None, target, resume)
    assert left.is_dir() and not target.exists()


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    export_checkpoint(base, None, tmp_path / "whole", SMALL)
    left = half_done(base, tmp_path / "export")
    first, second = sorted(left.glob("*.safetensors"))[:2]
    first.write_bytes(first.read_bytes()[:-1] + b"\x01")
    second.write_bytes(second.read_bytes()[:-1])
    export_checkpoint(base, None, tmp_path / "export", replace(SMALL, resume=True))
    assert contents(tmp_path / "export") == contents(tmp_path / "whole")


def test_where_nothing_is_left_it_says_so_and_starts(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", "llama")
    settings = replace(SMALL, resume=True)
    _, text = said(
        lambda context: export_checkpoint(base, None, tmp_path / "first", settings, context)
    )
    assert "no interrupted export to resume: exporting from the start" in text
    left = half_done(base, tmp_path / "export")
    file = left / JOURNAL_NAME
    file.write_text(file.read_text().splitlines()[0] + "\n{cut off")
    report, text = said(
        lambda context: export_checkpoint(base, None, tmp_path / "export", settings, context)
    )
    assert f"nothing in {left.name} can be reused: exporting from the start" in text
    assert report.reused == 0  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("export.partial-*"))
    assert contents(tmp_path / "export") == contents(tmp_path / "first")


def test_an_unfinished_export_is_told_of_and_never_sound(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base", "llama"))
    left = half_done(base, tmp_path / "export")
    _, text = said(lambda context: export_checkpoint(base, None, tmp_path / "other", SMALL))
    assert text == ""
    _, text = said(
        lambda context: export_checkpoint(base, None, tmp_path / "export", SMALL, context)
    )
    assert f"is in {left}: export.resume=true goes on with it" in text
    assert check_checkpoint(tmp_path / "export").sound
    (tmp_path / "export" / JOURNAL_NAME).write_text("")
    result = check_checkpoint(tmp_path / "export")
    assert not result.sound and "is not finished" in result.faults[0].what


def test_a_running_export_is_left_alone(tmp_path: Path) -> None:
    import fcntl

    base = save_model(tmp_path / "base", "llama")
    left = half_done(base, tmp_path / "export")
    with (left / JOURNAL_NAME).open("r+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(SwiftFP8Error, match="another export is writing"):
            export_checkpoint(base, None, tmp_path / "export", replace(SMALL, resume=True))
    assert left.is_dir()


def test_what_is_being_resumed_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first look at it, hashing included, until the end."""
    base = save_model(tmp_path / "base", "llama")
    half_done(base, tmp_path / "export")
    resume = replace(SMALL, resume=True)
    refused: list[str] = []

    def refuse_another(where: str, stage: Callable[..., object]) -> Callable[..., object]:
        def with_another(*arguments: object, **keywords: object) -> object:
            if where not in refused:
                refused.append(where)
                with pytest.raises(SwiftFP8Error, match="another export is writing"):
                    export_checkpoint(base, None, tmp_path / "export", resume)
            return stage(*arguments, **keywords)

        return with_another

    for where, stage in (("journal._hash_file", journal._hash_file), ("export.staged", staged)):
        monkeypatch.setattr(f"swiftfp8.export.{where}", refuse_another(where, stage))
    assert export_checkpoint(base, None, tmp_path / "export", resume).reused > 0
    assert refused == ["journal._hash_file", "export.staged"]


@pytest.mark.parametrize("line", ["[1]", "5", '{"fingerprint": null}'])
def test_a_damaged_journal_is_nothing_to_resume(tmp_path: Path, line: str) -> None:
    base = save_model(tmp_path / "base", "llama")
    left = half_done(base, tmp_path / "export")
    (left / JOURNAL_NAME).write_text(f"{line}\n")
    assert export_checkpoint(base, None, tmp_path / "export", replace(SMALL, resume=True))


def test_a_fault_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed its check is no good to resume."""

    def fail(*arguments: object, **keywords: object) -> None:
        raise RunFailed("planted")

    base = save_model(tmp_path / "base", "llama")
    monkeypatch.setattr("swiftfp8.export.export.verify_directory", fail)
    with pytest.raises(RunFailed, match="planted"):
        export_checkpoint(base, None, tmp_path / "export", replace(SMALL, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]

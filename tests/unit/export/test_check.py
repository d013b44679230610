"""What `export verify` says of a directory that holds no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.check import check_checkpoint


def complaint(directory: Path) -> SwiftFP8Error:
    with pytest.raises(SwiftFP8Error) as caught:
        check_checkpoint(directory)
    return caught.value


def test_a_run_directory_leads_to_its_export_or_to_the_command_that_makes_one(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    (run / "best").mkdir(parents=True)
    (run / "resolved.yaml").touch()
    told = complaint(run)
    assert "a run directory" in told.what
    assert told.fix == f"export it first: swiftfp8 export run={run}"
    for name in ("best", "export"):  # a fully trained checkpoint is a model too
        (run / name).mkdir(exist_ok=True)
        (run / name / "config.json").touch()
    (run / "export" / "export_report.json").touch()
    assert complaint(run).fix == f"give what lies in it: dir={run / 'export'}"


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    assert complaint(tmp_path / "exprt").fix == f"did you mean dir={tmp_path / 'export'}?"
    assert "holds no checkpoint" in complaint(tmp_path / "export").what

"""Memory for the checks that load a model whole: the machine's, or the container's."""

from pathlib import Path

import pytest
from export_kit import save_model

from swiftfp8.config.schema import ExportConfig
from swiftfp8.export import room
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.room import free_memory

MEMINFO = "MemTotal:       16 kB\nMemFree:        1 kB\nMemAvailable:   8192 kB\n"


def test_the_machine_and_the_container_count(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert free_memory(meminfo, tmp_path) is None
    meminfo.write_text(MEMINFO)
    assert free_memory(meminfo, tmp_path) == 8 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(meminfo, tmp_path) == 8 << 20
    (tmp_path / "memory.max").write_text(f"{4 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {1 << 20}\ninactive_file {2 << 20}\n")
    assert free_memory(meminfo, tmp_path) == 3 << 20


def test_without_room_the_files_are_read_back_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_memory", lambda: 1 << 30)
    report = export_checkpoint(
        save_model(tmp_path / "base"), None, tmp_path / "export", ExportConfig()
    )
    assert report.reload is None
    assert report.read_back and "1.0 GiB are free" in report.read_back.obstacle
    assert "GiB are free" in dict(report.facts())["reload"]

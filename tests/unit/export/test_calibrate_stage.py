"""Calibration inside an export: where its rows come from, what it refuses, what it reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_kit import save_model

from swiftfp8.config.paths import assets_dir
from swiftfp8.config.schema import Config, DataConfig, ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate_stage import CalibrationRows, read_calibration_rows
from swiftfp8.export.export import ExportContext, export_checkpoint
from swiftfp8.models.family import family_named

SETTINGS = ExportConfig(format="fp8_block", calibrate=True, calibration_tokens=512, verify=False)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"Row {n} says that {n} times 3 is {3 * n}."} for n in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def quickstart_model() -> Path:
    """The embedded tiny model's directory, which has a tokenizer."""
    return assets_dir() / str(family_named("tiny").embedded)


def random_rows() -> CalibrationRows:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(300, (20, 64), generator=generator).tolist()
    return CalibrationRows(rows=rows, first_token=1, seed=0)


def test_export_is_calibrated_and_says_so(tmp_path: Path) -> None:
    model_dir = save_model(tmp_path / "m")
    context = ExportContext(calibration_rows=random_rows)
    report = export_checkpoint(model_dir, None, tmp_path / "out", SETTINGS, context)
    assert report.calibration is not None
    assert report.calibration.calibrated < report.calibration.rounded
    assert len(report.calibration.layers) == report.quantized
    saved = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert saved["calibration"]["tokens"] == 512
    assert any(key == "calibration" and "mean output error" in text for key, text in report.facts())
    plain = export_checkpoint(
        model_dir, None, tmp_path / "plain", replace(SETTINGS, calibrate=False), context
    )
    assert plain.calibration is None and plain.export_bytes == report.export_bytes


def test_no_rows_is_the_users_mistake(tmp_path: Path) -> None:
    model_dir = save_model(tmp_path / "m")
    with pytest.raises(SwiftFP8Error, match="no rows to calibrate on"):
        export_checkpoint(model_dir, None, tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()
    with pytest.raises(SwiftFP8Error, match="no rows to calibrate on"):
        read_calibration_rows(Config(export=SETTINGS), model_dir, None)


def test_rows_are_the_runs_own_unless_others_are_named(texts: Path, tmp_path: Path) -> None:
    run = Config(dataset=["quickstart"], max_length=64)
    own = read_calibration_rows(run, quickstart_model(), None)
    assert len(own.rows) > 20 and max(map(len, own.rows)) <= 64
    # columns renamed for the training data do not exist in the other rows
    named = replace(
        run,
        data=DataConfig(columns={"question": "instruction"}),
        export=replace(SETTINGS, calibration_dataset=[str(texts)]),
    )
    other = read_calibration_rows(named, quickstart_model(), None)
    assert len(other.rows) == 20 and own.rows[0] != other.rows[0]


def test_text_that_judges_may_not_choose(texts: Path) -> None:
    settings = replace(SETTINGS, calibration_dataset=[f"{texts}#5"], fidelity_dataset=[str(texts)])
    with pytest.raises(SwiftFP8Error, match="both choose the rounding and judge it"):
        read_calibration_rows(Config(export=settings), quickstart_model(), None)

"""A calibrated export from the command line, read back by transformers in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from export_kit import save_model

from swiftfp8.config.paths import assets_dir
from swiftfp8.export.files import copy_companions
from swiftfp8.models.family import family_named


def test_command_calibrates_and_verifies(tmp_path: Path) -> None:
    vocabulary = json.loads((_quickstart() / "config.json").read_text())["vocab_size"]
    model_dir = save_model(tmp_path / "model", vocab_size=vocabulary)
    copy_companions(_quickstart(), None, model_dir)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "swiftfp8", "export", "model=model", "export_dir=out"),
            *("export.format=fp8_block", "export.calibrate=true"),
            *("export.calibration_dataset=[quickstart]", "export.calibration_tokens=1024"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "out/export_report.json").read_text())
    assert report["reload"]["bit_equal"]
    layers = report["calibration"]["layers"]
    assert len(layers) == 14
    assert all(layer["calibrated"] <= layer["rounded"] for layer in layers)


def _quickstart() -> Path:
    return assets_dir() / str(family_named("tiny").embedded)

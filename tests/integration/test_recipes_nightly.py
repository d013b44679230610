"""Every packaged recipe trains: its tiny twin, three steps on a CPU in emulated FP8.

bash scripts/nightly_tests.sh
"""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from recipe_twins import DATASETS, read_json, write_twin
from rich.console import Console

from swiftfp8 import pipeline
from swiftfp8.config.compose import compose_config
from swiftfp8.config.paths import recipes_dir, yaml_names
from swiftfp8.export.request import exports_after_training
from swiftfp8.train.metrics import read_log

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", yaml_names(recipes_dir()))
def test_a_recipe_trains_in_fp8_and_keeps_what_it_trained(name: str, tmp_path: Path) -> None:
    recipe = compose_config(name).config
    assert recipe.dataset[0] in DATASETS or recipe.model_type == "tiny", "give its rows a twin"
    twin = compose_config(name, write_twin(tmp_path, recipe))
    shown = io.StringIO()
    result = pipeline.train(twin, console=Console(file=shown, width=200))
    text = shown.getvalue()
    assert "WARNING" not in text, text
    assert result.last_checkpoint is not None
    assert result.steps == 3 and not result.interrupted
    losses = [line["loss"] for line in read_log(result.run_dir) if "loss" in line]
    assert len(losses) == 3 and all(loss is not None and math.isfinite(loss) for loss in losses)
    assert result.eval_loss is not None and math.isfinite(result.eval_loss)
    measured = read_json(result.run_dir / "precision_report.json")["measured"]
    assert measured["kept"] == 1.0 and measured["measured"] > 0.5
    if exports_after_training(recipe):
        report = read_json(result.run_dir / "export" / "export_report.json")
        assert report["quantized"] == 28  # seven in each of four layers

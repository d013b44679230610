"""The embedded example through the real command line: train, export, reload, answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
RUN_FILES = {
    "resolved.yaml",
    "overrides.txt",
    "environment.json",
    "plan.json",
    "precision_report.json",
    "logging.jsonl",
    "best",
    "last",
    "images",
}
RELOAD = """
import sys
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], quantization_config=FineGrainedFP8Config(dequantize=True), output_loading_info=True
)
assert not info["missing_keys"] and not info["unexpected_keys"], info
"""


def swiftfp8(folder: Path, *arguments: str) -> str:
    """Run the command line in `folder`; returns what it printed, and it must succeed."""
    return run(folder, "-m", "swiftfp8", *arguments)


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def losses(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "logging.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of the recipe, as it is, in it."""
    folder = tmp_path_factory.mktemp("quickstart")
    shown = swiftfp8(folder, "train", "config=quickstart", "run_name=one")
    (folder / "shown.txt").write_text(shown)
    return folder


def test_the_plan_says_why_fp8_fell_back(folder: Path) -> None:
    shown = " ".join((folder / "shown.txt").read_text().split())
    assert "fp8 can't be had" in shown and "compute capability 8.9" in shown


def test_the_run_directory_is_complete(folder: Path) -> None:
    run_dir = folder / "output" / "one"
    names = {path.name for path in run_dir.iterdir()}
    assert names >= RUN_FILES, RUN_FILES - names
    assert any(name.startswith("checkpoint-") for name in names)
    assert {path.suffix for path in (run_dir / "images").iterdir()} == {".png"}
    report = json.loads((run_dir / "precision_report.json").read_text())
    assert report["fallbacks"][0]["asked"] == "fp8"


def test_the_loss_falls_by_more_than_40_percent(folder: Path) -> None:
    first, *_, last = losses(folder / "output" / "one")
    assert last < 0.6 * first


def test_a_second_run_has_the_same_losses(folder: Path) -> None:
    for name in ("two", "three"):
        swiftfp8(
            folder, "train", "config=quickstart", "max_steps=6", "train.logging_steps=1",
            f"run_name={name}",
        )  # fmt: skip
    first = losses(folder / "output" / "two")
    assert len(first) == 6 and first == losses(folder / "output" / "three")


def test_the_export_loads_in_plain_transformers_and_answers(folder: Path) -> None:
    swiftfp8(folder, "export", "run=output/one")
    export = folder / "output" / "one" / "export"
    settings = json.loads((export / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    report = json.loads((export / "export_report.json").read_text())
    assert report["reload"]["max_difference"] == 0.0
    assert {verdict["figure"] for verdict in report["verdicts"]} == {
        "perplexity ratio",
        "token KL",
        "top-1 agreement",
        "perplexity ratio as served",
        "token KL as served",
        "top-1 agreement as served",
        "evaluation loss",
    }
    assert all(verdict["passed"] for verdict in report["verdicts"]), report["verdicts"]
    assert report["loss"]["trained"] < 0.5
    run(folder, "-c", RELOAD, str(export))
    answer = swiftfp8(
        folder, "infer", f"model={export}", "prompt=What is the largest planet in our solar system?"
    )
    assert "jupiter" in answer.lower(), answer


def test_what_was_learned_survives_the_merge(folder: Path) -> None:
    """Merging alone costs next to nothing: the loss on the evaluation rows, before and after."""
    swiftfp8(
        folder, "merge", "run=output/one", "export.verify=false", "export.fidelity=fail",
        "export.max_loss_increase=0.005",
    )  # fmt: skip
    report = json.loads((folder / "output" / "one" / "merged" / "export_report.json").read_text())
    loss = report["loss"]
    assert loss["trained"] < 0.5
    assert abs(loss["export"] / loss["trained"] - 1) < 0.005

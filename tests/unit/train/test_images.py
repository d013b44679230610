from __future__ import annotations

import json
from pathlib import Path

from swiftfp8.report.images import draw_images

PNG = b"\x89PNG\r\n\x1a\n"


def write(run_dir: Path, lines: list[dict]) -> None:
    (run_dir / "logging.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_every_series_gets_its_picture(tmp_path):
    write(
        tmp_path,
        [
            {"step": 1, "loss": 2.0, "learning_rate": 1e-4, "grad_norm": 1.0},
            {"step": 2, "loss": None, "learning_rate": 9e-5, "grad_norm": 0.5},
            {"step": 2, "eval_loss": 1.9},
            {"step": 3, "loss": 1.0, "learning_rate": 1e-5, "tokens_per_second": 3.0},
        ],
    )
    with (tmp_path / "logging.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    written = draw_images(tmp_path)
    names = {"loss.png", "learning_rate.png", "grad_norm.png", "throughput.png"}
    assert {path.name for path in written} == names
    assert {path.name for path in (tmp_path / "images").iterdir()} == names
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_metrics_of_other_tasks_get_theirs(tmp_path):
    write(tmp_path, [{"step": 1, "loss": 2.0, "accuracy": 0.5}, {"step": 1, "eval_accuracy": 0.6}])
    assert {path.name for path in draw_images(tmp_path)} == {"loss.png", "accuracy.png"}
    write(tmp_path, [{"step": 1, "eval_rewards/margins": 0.6}])
    assert [path.name for path in draw_images(tmp_path)] == ["margins.png"]


def test_no_values_no_picture(tmp_path):
    assert draw_images(tmp_path) == []
    write(tmp_path, [{"step": 1, "loss": 2.0}])
    assert [path.name for path in draw_images(tmp_path)] == ["loss.png"]

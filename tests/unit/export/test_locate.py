"""A run's base model and checkpoint are found, or what is missing is said."""

import json
from pathlib import Path

import pytest

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.locate import locate_run


def make_run(root: Path, base: str | None = None) -> Path:
    """A LoRA run with checkpoint-10 (best) and checkpoint-20 (last)."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    run = root / "run"
    for step in (10, 20):
        checkpoint = run / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        config = {"base_model_name_or_path": base or str(model)}
        (checkpoint / "adapter_config.json").write_text(json.dumps(config))
    (run / "resolved.yaml").write_text("seed: 1\n")
    (run / "best").symlink_to("checkpoint-10")
    (run / "last").symlink_to("checkpoint-20")
    return run


def test_best_then_last_then_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert locate_run(run) == (tmp_path / "model", run / "checkpoint-10")
    assert locate_run(run, "checkpoint-20")[1] == run / "checkpoint-20"
    (run / "best").unlink()
    assert locate_run(run)[1] == run / "checkpoint-20"


def test_a_full_checkpoint_is_the_model(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "checkpoint-10" / "adapter_config.json").rename(run / "checkpoint-10" / "config.json")
    assert locate_run(run) == (run / "checkpoint-10", None)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="no such run"):
        locate_run(tmp_path / "none")
    run = make_run(tmp_path, base="/gone/model")
    with pytest.raises(SwiftFP8Error, match="/gone/model"):
        locate_run(run)
    with pytest.raises(SwiftFP8Error) as caught:
        locate_run(run, "checkpoint-21")
    assert caught.value.fix == "did you mean checkpoint-20?"
    (tmp_path / "other").mkdir()
    for name in ("../other", str(run / "checkpoint-20"), "..", "."):
        with pytest.raises(SwiftFP8Error, match="no name of a checkpoint within the run") as caught:
            locate_run(run, name)
        assert caught.value.where == f"checkpoint={name}"
    (run / "best").unlink()
    (run / "last").unlink()
    with pytest.raises(SwiftFP8Error, match="no checkpoint yet"):
        locate_run(run)

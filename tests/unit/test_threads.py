"""A tiny model runs on one CPU thread, whatever is done with it; who set their own keep them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from swiftfp8 import evaluate, infer, pipeline
from swiftfp8.config.paths import assets_dir
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.family import family_named
from swiftfp8.requests import EvalRequest, ExportRequest, InferRequest
from swiftfp8.threads import cpu_threads, threads_for

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="models run on the GPU here")


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(assets_dir() / str(family_named("tiny").embedded), tmp_path / "m"))


def test_only_a_tiny_model_on_a_cpu_takes_one_thread(model: Path) -> None:
    assert cpu_threads(3_000_000, "cpu") == 1
    assert cpu_threads(3_000_000, "cuda") is None and cpu_threads(10**9, "cpu") is None
    with threads_for(model):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_threads_that_the_user_set_stay(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads_for(model):
        assert torch.get_num_threads() == 2


def test_weights_that_are_unknown_or_damaged_leave_the_threads(model: Path) -> None:
    """They are for the command to judge, as where there is a GPU."""
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with threads_for(model):
        assert torch.get_num_threads() == 2
    request = InferRequest(model=str(model), prompt="?")
    with pytest.raises(SwiftFP8Error, match="is truncated: expected"):
        pipeline.infer(request)
    weights.unlink()
    with threads_for(model):
        assert torch.get_num_threads() == 2


def test_a_stray_file_beside_the_weights_is_not_judged(model: Path) -> None:
    (model / "notes.safetensors").write_bytes(b"no header")
    with threads_for(model):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("command", ["export", "merge", "evaluate", "infer"])
def test_every_command_on_a_tiny_model_takes_one_thread(
    command: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def stage(*args: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        return SimpleNamespace()

    monkeypatch.setattr("swiftfp8.export.export.export_checkpoint", stage)
    monkeypatch.setattr("swiftfp8.export.export.merge_checkpoint", stage)
    monkeypatch.setattr(evaluate, "evaluate", stage)
    monkeypatch.setattr(evaluate, "print_evaluation", lambda *_: None)
    monkeypatch.setattr(infer, "chat", stage)
    name, target = str(model), f"export_dir={tmp_path / 'out'}"
    if command == "evaluate":
        pipeline.evaluate(EvalRequest(model=name, dataset="quickstart"), console=Console())
    elif command == "infer":
        pipeline.infer(InferRequest(model=name, prompt="?"))
    else:
        request = ExportRequest(model=name, overrides=(target,))
        getattr(pipeline, command)(request, console=Console())
    assert seen == [1] and torch.get_num_threads() == 2

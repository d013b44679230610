"""Tests of the real thing. Without a GPU they skip; where one is promised, they fail instead."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from swiftfp8.precision import te

PROMISED = os.environ.get("SWIFTFP8_GPU_TESTS") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _gpu_with_fp8() -> None:
    """Fail, where SWIFTFP8_GPU_TESTS=1 promises a GPU, instead of skipping all that matters."""
    reason = None if torch.cuda.is_available() else "no CUDA device"
    reason = reason or te.available()
    if reason is None:
        return
    if PROMISED:
        pytest.fail(f"SWIFTFP8_GPU_TESTS=1, but FP8 can't run: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _clean_gpu() -> Iterator[None]:
    """Free memory, and Transformer Engine's global amax buffers, between tests."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if te.available() is None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()

"""The Triton kernels compute what their references do, shown on a CPU by Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (a CPU PyTorch)"
)


def interpreted(name: str) -> dict[str, float]:
    """What the program beside this file prints."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    program = str(Path(__file__).with_name(name))
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_match_their_references() -> None:
    errors = interpreted("interpreted_kernels.py")
    assert len(errors) > 30
    # BF16 results, and BF16 operands that the references keep in float32, round by up to 2**-8;
    # FP8 results differ only where a value falls on the other side of a rounding boundary.
    assert not {name: error for name, error in errors.items() if not error < 5e-3}


def test_adamw_follows_torchs_and_rounds_moments_without_bias() -> None:
    """NaN, FP32 gradients and an exact resume are asserted by the program itself."""
    measured = interpreted("interpreted_adamw.py")
    # Two ulps of a master and 2**-20 of the update, which approximate roots and quotients move.
    assert measured["masters, share of the bound"] < 1
    assert measured["moments, ulps"] <= 2  # of FP32: products and sums are contracted or not
    # Seeded: within three standard errors of 4096 elements' mean.
    for key in ("exp_avg", "exp_avg_sq"):
        assert abs(measured[f"bias of {key}, standard errors"]) < 3
    assert abs(measured["correlation of moments"]) < 3 / 64
    assert abs(measured["correlation of neighbours"]) < 3 / 64
    # Of 0.999**100 = 0.905. Rounded to nearest it would stay at 1.
    assert abs(measured["decay"] - 1) < 0.002

"""The Triton kernels compute what their references do, shown on a CPU by Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interpreted_kernels.py")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (a CPU PyTorch)"
)
def test_kernels_match_their_references() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) > 30
    # BF16 results, and BF16 operands that the references keep in float32, round by up to 2**-8;
    # FP8 results differ only where a value falls on the other side of a rounding boundary. The
    # gradients of gate and up are held in BF16 before the cast, which moves a few more across:
    # 1% on top of FP8's own 2.6%.
    too_large = {
        name: error
        for name, error in errors.items()
        if not error < (1.5e-2 if name.endswith("back[0]") and "swiglu" in name else 5e-3)
    }
    assert not too_large

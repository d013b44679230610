"""Exports served: vLLM and transformers, each in a fresh process, against the dequantized weights.

Every model x format is either refused before anything is written, with the reason, or gives the
log-probabilities of the exporter's own dequantized model. vLLM quantizes activations as it runs and
multiplies in BF16; the tolerances are for that: 0.02 where scales are per block (or nothing is
quantized), 0.1 where they are per channel and per token. transformers dequantizes on a CPU, so its
logits must be equal bit for bit.

`bash scripts/engine_tests.sh` makes the environment and sets SWIFTFP8_ENGINE_PYTHON.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from export_kit import save_model, save_tokenizer

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate_stage import CalibrationRows
from swiftfp8.export.export import ExportContext, export_checkpoint, find_format
from swiftfp8.export.layout import FormatOptions
from swiftfp8.export.report import ExportReport
from swiftfp8.export.source import build_model, open_source

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# initializer_range 0.05: the model has preferences, so that a wrong weight shows in the output.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama_tied", {}),
    "llama_448": ("llama", {"intermediate_size": 448}),
    "llama_320": ("llama", {"hidden_size": 320}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
}
FORMATS = ("fp8_block", "compressed_tensors", "fp8", "modelopt", "bf16")
TOLERANCE = {"fp8_block": 0.02, "bf16": 0.02}
CHANNEL_TOLERANCE = 0.1
REFUSED = {
    ("llama_320", "fp8_block"): "no linear of this model can be FP8",
    ("qwen3_moe", "modelopt"): "experts run as one module",
}
# What vLLM says where its CPU build lacks a kernel: the export is not at fault, nor shown right.
NO_KERNEL = {
    "Unsupported FP8 MoE backend": "vLLM has no CPU kernel for FP8 experts",
    "static_scaled_fp8_quant() expected": "vLLM has no CPU kernel for one scale per weight",
    "no attribute 'silu_and_mul_quant'": "vLLM has no CPU kernel for static activation scales",
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_RUST_FRONTEND": "0",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
WORKER = Path(__file__).with_name("vllm_worker.py")


@dataclass(frozen=True)
class Exported:
    """A base, its export or the reason why there is none."""

    base: Path
    directory: Path
    report: ExportReport | None
    refusal: SwiftFP8Error | None


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@functools.cache
def exported(root: Path, model: str, name: str) -> Exported:
    family, changes = MODELS[model]
    base = root / model
    if not base.exists():
        save_model(base, family, initializer_range=0.05, **changes)
        save_tokenizer(base)
    directory = root / f"{model}-{name}"
    settings = ExportConfig(format=name, calibration_tokens=256)
    context = ExportContext(calibration_rows=calibration_rows)
    try:
        report = export_checkpoint(base, None, directory, settings, context)
    except SwiftFP8Error as error:
        return Exported(base, directory, None, error)
    return Exported(base, directory, report, None)


def calibration_rows() -> CalibrationRows:
    rows = torch.randint(300, (16, 32), generator=torch.Generator().manual_seed(1)).tolist()
    return CalibrationRows(rows=rows, first_token=None, seed=0)


@functools.cache
def reference(root: Path, model: str, name: str) -> tuple[list[list[int]], torch.Tensor]:
    """Token rows, and the log-probabilities of all but their first token."""
    source, export_format = open_source(root / model), find_format(name)
    amax = None
    if name == "modelopt":
        layout = export_format.describe(source, FormatOptions())
        amax = {key.removesuffix(".weight"): 1.0 for key in layout.quantized}
    layout = export_format.describe(source, FormatOptions(input_amax=amax))
    weights = export_format.reference(source, layout)
    ids = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(0))
    dense = build_model(source, weights, dtype=torch.float32)
    with torch.inference_mode():
        logp = dense(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return ids.tolist(), logp.gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_transformers(root: Path, model: str, name: str) -> None:
    export = exported(root, model, name)
    if (model, name) in REFUSED:
        assert export.refusal and REFUSED[model, name] in str(export.refusal)
        assert not export.directory.exists()
        return
    assert export.report, export.refusal
    if name in ("fp8", "modelopt"):
        settings = ExportConfig(format=name, target="transformers")
        with pytest.raises(SwiftFP8Error, match="nonsense"):
            export_checkpoint(export.base, None, root / "refused", settings)
        assert not (root / "refused").exists()
        return
    assert export.report.reload, export.report.facts()
    assert export.report.reload.bit_equal


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_vllm(root: Path, model: str, name: str, tmp_path: Path) -> None:
    if (model, name) in REFUSED:
        pytest.skip(f"refused before writing: {REFUSED[model, name]}")
    python = engine_python()
    if name == "fp8_block" and not has_amx(python):
        pytest.skip("vLLM needs a CPU with AMX for 128x128 blocks")
    export = exported(root, model, name)
    assert export.report, export.refusal
    ids, expected = reference(root, model, name)
    assert expected.std() > 0.3  # else any weights would pass
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    command = [python, str(WORKER), str(export.directory)]
    command += [str(tmp_path / "ids.json"), str(tmp_path / "out.json")]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = next((r for said, r in NO_KERNEL.items() if said in done.stderr), None)
        if reason:
            pytest.skip(f"{reason} (it loaded the weights, and could not run them)")
        pytest.fail(f"vLLM could not run {export.directory.name}:\n{done.stderr[-3000:]}")
    found = torch.tensor(json.loads((tmp_path / "out.json").read_text()))
    difference = float((found - expected).abs().mean())
    print(f"{model} {name}: mean |dlogp| {difference:.4f}")
    assert difference <= TOLERANCE.get(name, CHANNEL_TOLERANCE)


@functools.cache
def engine_python() -> str:
    python = os.environ.get("SWIFTFP8_ENGINE_PYTHON")
    if not python or not Path(python).exists():
        pytest.skip("no engine environment: run scripts/engine_tests.sh")
    return python


@functools.cache
def has_amx(python: str) -> bool:
    code = "import torch, sys; sys.exit(not torch.cpu._is_amx_tile_supported())"
    return subprocess.run([python, "-c", code], check=False).returncode == 0

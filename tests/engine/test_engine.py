"""Exports served: vLLM and transformers, each in a fresh process, against the dequantized weights.

Every model x format is either refused before anything is written, with the reason, or gives the
log-probabilities of the exporter's own dequantized model. vLLM quantizes activations as it runs and
multiplies in BF16; the limits are for that: 0.02 where scales are per block (or nothing is
quantized), 0.1 where they are per channel and per token. transformers dequantizes on a CPU, so its
logits must be equal bit for bit.

`bash scripts/engine_tests.sh` makes the environment and sets SWIFTFP8_ENGINE_PYTHON.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from export_kit import save_model, save_tokenizer

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate_stage import CalibrationRows
from swiftfp8.export.engine_run import (
    NO_KERNEL,
    Engine,
    EngineError,
    find_engine,
    limit_for,
    run_engine,
)
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
REFUSED = {
    ("llama_320", "fp8_block"): "no linear of this model can be FP8",
    ("qwen3_moe", "modelopt"): "experts run as one module",
}


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
def test_vllm(root: Path, model: str, name: str) -> None:
    if (model, name) in REFUSED:
        pytest.skip(f"refused before writing: {REFUSED[model, name]}")
    vllm = engine()
    if why := vllm.why_not(name):
        pytest.skip(why)
    export = exported(root, model, name)
    assert export.report, export.refusal
    ids, expected = reference(root, model, name)
    assert expected.std() > 0.3  # else any weights would pass
    try:
        found = run_engine(vllm, export.directory, ids, expected.tolist(), expected.tolist())
    except EngineError as error:
        if str(error) in NO_KERNEL.values():
            pytest.skip(f"{error} (it loaded the weights, and could not run them)")
        raise
    print(f"{model} {name}: mean |dlogp| {found.mean_difference:.4f}")
    assert found.mean_difference <= limit_for(name)


@pytest.mark.parametrize("name", ["compressed_tensors", "bf16"])
def test_an_export_is_not_done_before_vllm_has_run_it(
    root: Path, tmp_path: Path, name: str
) -> None:
    base = exported(root, "qwen3", "bf16").base
    settings = ExportConfig(format=name, smoke="require", engine_python=engine().python)
    report = export_checkpoint(base, None, tmp_path / "out", settings)
    ran = report.judgement.engine
    assert ran and ran.tokens > 30
    assert ran.mean_difference <= limit_for(name) + ran.bf16_floor < 2 * limit_for(name)
    assert f"vLLM {engine().version}" in (tmp_path / "out" / "README.md").read_text()


@functools.cache
def engine() -> Engine:
    python = os.environ.get("SWIFTFP8_ENGINE_PYTHON")
    if not python or not Path(python).exists():
        pytest.skip("no engine environment: run scripts/engine_tests.sh")
    found = find_engine(python)
    assert isinstance(found, Engine)
    return found


@pytest.mark.parametrize("option", ["activation_scheme", "kv_cache"])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_vllm_reads_measured_scales(root: Path, model: str, option: str) -> None:
    """Static scales of activations and of the cache: loaded, and as near as without them."""
    base = exported(root, model, "bf16").base
    changes = {"activation_scheme": "static"} if option == "activation_scheme" else {option: "fp8"}
    settings = ExportConfig(format="compressed_tensors", calibration_tokens=256, **changes)
    context = ExportContext(calibration_rows=calibration_rows)
    directory = root / f"{model}-{option}"
    export_checkpoint(base, None, directory, settings, context)
    ids, expected = reference(root, model, "compressed_tensors")
    try:
        found = run_engine(engine(), directory, ids, expected.tolist(), expected.tolist())
    except EngineError as error:
        if str(error) in NO_KERNEL.values():
            pytest.skip(f"{error} (it loaded the weights, and could not run them)")
        raise
    print(f"{model} {option}: mean |dlogp| {found.mean_difference:.4f}")
    assert found.mean_difference <= limit_for("compressed_tensors")

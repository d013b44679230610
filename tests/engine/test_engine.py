"""Exports served: vLLM and transformers, each in a process of its own, against dequantized weights.

Every model x format is either refused before anything is written, with the reason, or gives the
log-probabilities of the exporter's own dequantized model. vLLM quantizes activations as it runs and
multiplies in BF16; the limits are for that: 0.1 where activations are rounded, 0.02 where nothing
is (`bf16`; blocks on a CPU). transformers dequantizes on a CPU, so its logits must be equal bit for
bit.

The processes are forks of a Python that has imported vLLM or transformers and nothing else
(`fork_server`); on CPUs with AMX, unless vLLM runs on a GPU, and in
`test_an_export_is_not_done_before_vllm_has_run_it`, vLLM starts from nothing, as users' does.

SWIFTFP8_NO_FORKS=1 starts all of them so, for machines where imports start threads.

`bash scripts/engine_tests.sh` makes the environment and sets SWIFTFP8_ENGINE_PYTHON; its
ENGINE_PYTHON may name one with vLLM's CUDA build.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from export_kit import save_model, save_tokenizer
from fork_server import fork_server

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export import verify
from swiftfp8.export.calibrate_stage import CalibrationRows
from swiftfp8.export.engine_run import (
    NO_KERNEL,
    Engine,
    EngineError,
    EngineRun,
    engine_environment,
    find_engine,
    limit_for,
    run_engine,
)
from swiftfp8.export.export import ExportContext, export_checkpoint, find_format
from swiftfp8.export.layout import FormatOptions
from swiftfp8.export.report import ExportReport
from swiftfp8.export.source import build_model, open_source

pytestmark = [pytest.mark.engine, pytest.mark.timeout(150)]
NO_FORKS = bool(os.environ.get("SWIFTFP8_NO_FORKS"))

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
FORMATS = ("fp8_block", "compressed_tensors", "bf16", "modelopt", "fp8")
# The formats that tell most come first: there may be no time for the last.
CASES = [(model, name) for name in FORMATS for model in MODELS]
REFUSED = {
    ("llama_320", "fp8_block"): "no linear of this model can be FP8",
    ("qwen3_moe", "modelopt"): "experts run as one module",
}
# What the models and formats of this file need.
ARCHITECTURES = ("llama", "qwen3", "qwen3_moe")
TRANSFORMERS_IMPORTS = (
    "compressed_tensors",
    "safetensors.torch",
    "swiftfp8.export.checkpoint_io",
    "swiftfp8.models.task_model",
    "transformers.integrations.finegrained_fp8",
    "transformers.quantizers.auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ARCHITECTURES),
)
VLLM_IMPORTS = (
    "vllm.entrypoints.llm",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.modelopt",
    *(f"vllm.model_executor.models.{name}" for name in ARCHITECTURES),
)
# None of these touches a GPU before a fork does.
VLLM_DEVICE_IMPORTS = {
    "cpu": ("vllm.v1.attention.backends.cpu_attn", "vllm.v1.worker.cpu_worker"),
    "cuda": (
        "vllm.v1.attention.backends.flash_attn",
        "vllm.v1.attention.backends.triton_attn",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.gpu_worker",
    ),
}


Record = Callable[[str, object], None]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An export, or the reason why there is none."""

    model: str
    format: str
    directory: Path
    report: ExportReport | None = None
    refusal: SwiftFP8Error | None = None


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def monkeypatch_session() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="session")
def engine_python() -> str:
    if why := os.environ.get("SWIFTFP8_NO_ENGINE"):
        pytest.skip(why)
    if not (python := os.environ.get("SWIFTFP8_ENGINE_PYTHON")):
        pytest.skip("no engine environment: run scripts/engine_tests.sh")
    return python


@pytest.fixture(scope="session")
def vllm(
    root: Path, engine_python: str, monkeypatch_session: pytest.MonkeyPatch
) -> Iterator[Engine]:
    own = find_engine(engine_python)
    assert isinstance(own, Engine)
    amx = own.amx and own.device == "cpu"  # a state of the processor: forks were not tried with it
    if NO_FORKS or amx:
        yield own
        return
    # The thread that pyarrow starts where pandas is: a server of forks must have none.
    monkeypatch_session.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")
    environment = engine_environment()
    modules = (*VLLM_IMPORTS, *VLLM_DEVICE_IMPORTS[own.device])
    with fork_server(root / "vllm", engine_python, modules, environment) as python:
        found = find_engine(str(python))
        assert isinstance(found, Engine)
        yield found


@pytest.fixture(scope="session")
def transformers(root: Path) -> Iterator[str]:
    if NO_FORKS:
        yield sys.executable
        return
    environment = verify.reload_environment()
    folder = root / "transformers"
    with fork_server(folder, sys.executable, TRANSFORMERS_IMPORTS, environment) as python:
        yield str(python)


@pytest.fixture(scope="session", params=CASES, ids="-".join)
def export(request: pytest.FixtureRequest, root: Path, transformers: str) -> Exported:
    model, name = request.param
    directory, settings = root / f"{model}-{name}", ExportConfig(format=name)
    try:
        report = write_export(transformers, base(root, model), directory, settings)
    except SwiftFP8Error as error:
        return Exported(model=model, format=name, directory=directory, refusal=error)
    return Exported(model=model, format=name, directory=directory, report=report)


def test_transformers(root: Path, export: Exported) -> None:
    if reason := REFUSED.get((export.model, export.format)):
        assert export.refusal and reason in str(export.refusal)
        assert not export.directory.exists()
        return
    assert export.report, export.refusal
    if export.format in ("fp8", "modelopt"):
        settings = ExportConfig(format=export.format, target="transformers")
        with pytest.raises(SwiftFP8Error, match="nonsense"):
            export_checkpoint(base(root, export.model), None, root / "refused", settings)
        assert not (root / "refused").exists()
        return
    assert export.report.reload, export.report.facts()
    assert export.report.reload.bit_equal


def test_vllm(root: Path, export: Exported, vllm: Engine, record_property: Record) -> None:
    if reason := REFUSED.get((export.model, export.format)):
        pytest.skip(f"refused before writing: {reason}")
    if why := vllm.why_not(export.format):
        pytest.skip(why)
    assert export.report, export.refusal
    found = run(vllm, export.directory, *reference(root, export.model, export.format))
    record_property("mean |dlogp|", round(found.mean_difference, 4))
    assert found.mean_difference <= limit_for(vllm, export.format)


@pytest.mark.parametrize("option", ["activation_scheme", "kv_cache"])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_vllm_reads_measured_scales(
    root: Path,
    transformers: str,
    vllm: Engine,
    model: str,
    option: str,
    record_property: Record,
) -> None:
    """Static scales of activations and of the cache: loaded, and as near as without them."""
    changes = {"activation_scheme": "static"} if option == "activation_scheme" else {option: "fp8"}
    settings = ExportConfig(format="compressed_tensors", **changes)
    directory = root / f"{model}-{option}"
    write_export(transformers, base(root, model), directory, settings)
    found = run(vllm, directory, *reference(root, model, "compressed_tensors"))
    record_property("mean |dlogp|", round(found.mean_difference, 4))
    assert found.mean_difference <= limit_for(vllm, "compressed_tensors")


@pytest.mark.parametrize("name", ["compressed_tensors", "bf16"])
def test_an_export_is_not_done_before_vllm_has_run_it(
    root: Path, tmp_path: Path, engine_python: str, name: str
) -> None:
    settings = ExportConfig(format=name, smoke="require", engine_python=engine_python)
    report = export_checkpoint(base(root, "qwen3"), None, tmp_path / "out", settings)
    ran = report.judgement.engine
    assert report.reload and report.reload.bit_equal
    assert ran and ran.tokens > 30
    engine = find_engine(engine_python)
    assert isinstance(engine, Engine)
    limit = limit_for(engine, name)
    assert ran.mean_difference <= limit + ran.bf16_floor < 2 * limit
    assert ran.engine in (tmp_path / "out" / "README.md").read_text()


def write_export(
    transformers: str, base: Path, directory: Path, settings: ExportConfig
) -> ExportReport:
    """An export, read again by a fork of `transformers`."""
    settings = replace(settings, calibration_tokens=256)
    context = ExportContext(calibration_rows=calibration_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "sys", SimpleNamespace(executable=transformers))
        return export_checkpoint(base, None, directory, settings, context)


def run(vllm: Engine, directory: Path, ids: list[list[int]], expected: torch.Tensor) -> EngineRun:
    assert expected.std() > 0.3  # else any weights would pass
    try:
        return run_engine(vllm, directory, ids, expected.tolist(), expected.tolist())
    except EngineError as error:
        if str(error) in NO_KERNEL.values():
            pytest.skip(f"{error} (it loaded the weights, and could not run them)")
        raise


@functools.cache
def base(root: Path, model: str) -> Path:
    family, changes = MODELS[model]
    save_model(root / model, family, initializer_range=0.05, **changes)
    return save_tokenizer(root / model)


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

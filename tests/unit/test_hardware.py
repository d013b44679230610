import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest

from swiftfp8 import hardware as module
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.hardware import ALL_FP8, parse_hardware, probe


@pytest.mark.parametrize(
    ("name", "works", "not_here"),
    [
        ("h200", {"fp8_block", "fp8_current", "fp8_delayed", "bf16", "fp16", "fp32"}, {"mxfp8"}),
        ("rtx4090", {"fp8_current", "fp8_delayed", "bf16"}, {"fp8_block", "mxfp8"}),
        ("l40s", {"fp8_current", "fp8_delayed", "bf16"}, {"fp8_block", "mxfp8"}),
        ("b200", {"mxfp8", "fp8_current", "fp8_delayed", "bf16"}, {"fp8_block"}),
        ("rtx5090", {"fp8_current", "fp8_delayed", "bf16"}, {"fp8_block", "mxfp8"}),
        ("a100", {"bf16", "fp16"}, set(ALL_FP8)),
        ("t4", {"fp16", "fp32"}, {"bf16", *ALL_FP8}),
        ("v100", {"fp16", "fp32"}, {"bf16", *ALL_FP8}),
    ],
)
def test_what_each_generation_can_do(name: str, works: set[str], not_here: set[str]) -> None:
    hardware = parse_hardware(name)
    assert {p for p in works if hardware.why_not(p) is not None} == set()
    assert {p for p in not_here if hardware.why_not(p) is None} == set()
    assert not hardware.probed


def test_reasons_can_be_read() -> None:
    assert parse_hardware("a100").why_not("fp8_current") == (
        "NVIDIA A100 has compute capability 8.0; FP8 matmuls need 8.9 or newer "
        "(Ada, Hopper, Blackwell)"
    )
    assert "BF16 needs 8.0 or newer" in (parse_hardware("t4").why_not("bf16") or "")


@pytest.mark.parametrize(
    ("text", "sm"),
    [
        ("mygpu:8.9:24", (8, 9)),
        ("mygpu:89:24", (8, 9)),
        ("x:9:80", (9, 0)),
        ("x:10:180", (10, 0)),
        ("x:100:180", (10, 0)),
        ("x:12.1:119.5", (12, 1)),
    ],
)
def test_hardware_by_hand(text: str, sm: tuple[int, int]) -> None:
    hardware = parse_hardware(text)
    assert (hardware.sm, hardware.name) == (sm, text.split(":")[0])
    assert hardware.memory_gib == float(text.split(":")[2])


@pytest.mark.parametrize("text", ["gpu:8.9", "gpu:x:24", "gpu:8.9:0", "gpu:2.0:4", ":8.9:24"])
def test_malformed_triples_say_how_to_write_them(text: str) -> None:
    with pytest.raises(SwiftFP8Error, match="can't read hardware") as caught:
        parse_hardware(text)
    assert "mygpu:8.9:24" in str(caught.value)


def test_names_are_forgiving_and_unknown_ones_suggested() -> None:
    assert parse_hardware("NVIDIA GeForce RTX 4090") == parse_hardware("rtx4090")
    with pytest.raises(SwiftFP8Error, match="unknown hardware 'rtx4900'") as caught:
        parse_hardware("rtx4900")
    assert "did you mean rtx4090?" in str(caught.value)


def test_bf16_on_a_cpu_only_where_it_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    assert "no native BF16" in (parse_hardware("cpu").why_not("bf16") or "")
    for flag in ("avx512_bf16", "amx_bf16", "bf16"):
        monkeypatch.setattr(module, "_cpu_flags", lambda flag=flag: frozenset({flag}))
        assert parse_hardware("cpu").why_not("bf16") is None
    cpu = parse_hardware("cpu")
    assert cpu.why_not("fp32") is None
    assert all(cpu.why_not(recipe) for recipe in ALL_FP8)
    assert cpu.memory_gib > 0


def fake_cuda(
    monkeypatch: pytest.MonkeyPatch, *, sm: tuple[int, int], hip: str | None = None
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: sm)
    properties = SimpleNamespace(total_memory=139 * module.GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", hip)


def fake_te(monkeypatch: pytest.MonkeyPatch, **answers: tuple[bool, str]) -> None:
    te = ModuleType("transformer_engine.pytorch")
    for name, answer in answers.items():
        setattr(te, name, lambda return_reason, answer=answer: answer)
    package = ModuleType("transformer_engine")
    package.__version__ = "2.20.2"  # type: ignore[attr-defined]
    package.pytorch = te  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)


def test_probe_quotes_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, sm=(9, 0))
    fake_te(
        monkeypatch,
        is_fp8_available=(True, ""),
        is_fp8_block_scaling_available=(False, "needs CUDA >= 12.9."),
        is_mxfp8_available=(False, "needs 10.0"),
    )
    found = probe()
    assert (found.te_version, found.count, found.memory_gib) == ("2.20.2", 2, 139)
    assert found.why_not("fp8_current") is None
    assert found.why_not("fp8_block") == "Transformer Engine: needs CUDA >= 12.9"
    assert "MXFP8 needs 10.0 or newer" in (found.why_not("mxfp8") or "")  # the device comes first


def test_probe_without_transformer_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cuda(monkeypatch, sm=(9, 0))
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(None), *sys.meta_path])
    found = probe()
    assert found.te_version is None
    assert "fp8_current" not in found.unavailable
    assert "not installed" in (found.why_not("fp8_current") or "")
    assert "swiftfp8[te-cu13]" in (found.why_not("fp8_current") or "")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no driver\nmore"), OSError("libcudnn.so.9: no"), AssertionError("mismatch")],
)
def test_probe_survives_a_broken_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fake_cuda(monkeypatch, sm=(9, 0))
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refusing(error), *sys.meta_path])
    reason = probe().why_not("fp8_delayed") or ""
    assert f"does not load: {type(error).__name__}: {str(error).splitlines()[0]}" in reason
    assert "more" not in reason


class Refusing:
    """A finder that fails for Transformer Engine as a broken or missing install does."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.split(".")[0] == "transformer_engine":
            raise self.error or ModuleNotFoundError("no module", name="transformer_engine")


def test_an_amd_gpu_is_not_taken_for_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, sm=(9, 4), hip="6.4")
    found = probe()
    assert found.sm is None
    assert "AMD" in (found.why_not("fp8_current") or "")
    assert found.why_not("bf16") is None


def test_importing_the_module_imports_neither_torch_nor_transformer_engine() -> None:
    import subprocess

    code = (
        "import sys, swiftfp8.hardware, swiftfp8.plan; "
        "swiftfp8.hardware.parse_hardware('h200'); "
        "assert not {'torch', 'transformer_engine'} & set(sys.modules)"
    )
    assert importlib.util.find_spec("torch") is not None
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

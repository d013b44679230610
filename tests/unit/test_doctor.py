import io
from dataclasses import replace

import pytest
from rich.console import Console

from swiftfp8 import doctor as module
from swiftfp8 import engine
from swiftfp8.doctor import NOT_READY, READY, advice, doctor, report
from swiftfp8.hardware import ALL_FP8, Hardware, parse_hardware

pytestmark = pytest.mark.usefixtures("te_alone")


def text_and_code(hardware: Hardware) -> tuple[str, int]:
    out = io.StringIO()
    code = report(Console(file=out, width=100), hardware)
    return " ".join(out.getvalue().split()), code


@pytest.mark.parametrize(
    ("name", "code"),
    [("h200", READY), ("rtx4090", READY), ("b200", READY), ("a100", NOT_READY), ("t4", NOT_READY)],
)
def test_the_exit_code_says_whether_fp8_is_ready(name: str, code: int) -> None:
    text, given = text_and_code(parse_hardware(name))
    assert given == code
    assert ("FP8 is ready." in text) == (code == READY)


def test_every_precision_is_listed_with_its_reason() -> None:
    text, _ = text_and_code(parse_hardware("rtx4090"))
    for precision in (*ALL_FP8, "bf16", "fp16", "fp32"):
        assert f" {precision} " in text
    assert "MXFP8 needs 10.0 or newer" in text
    assert "block scaling runs natively on 9.0" in text


def without_te(reason: str) -> Hardware:
    return replace(
        parse_hardware("h100"),
        te_version=None,
        te_reason=reason,
        te_unavailable=dict.fromkeys(ALL_FP8, reason),
        cuda_version="12.8",
    )


def test_missing_transformer_engine_names_the_extra_of_torch_s_cuda() -> None:
    text, code = text_and_code(without_te("Transformer Engine is not installed"))
    assert code == NOT_READY
    assert "pip install --no-build-isolation 'swiftfp8[te-cu12]'" in text
    assert "checkout of the source: pip install --no-build-isolation -e '.[te-cu12]'" in text


def test_the_torch_engine_is_offered_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = without_te("Transformer Engine is not installed")
    text, code = text_and_code(missing)
    assert code == NOT_READY and "precision.backend=torch, which needs no" in text
    monkeypatch.setattr(engine, "AUTO_ENGINES", ("torch", "te"))
    assert text_and_code(missing)[1] == READY
    text, code = text_and_code(replace(missing, torch_reason="Triton is not installed"))
    assert code == NOT_READY and "Triton is not installed" in text
    assert "which needs no" not in text


def test_a_broken_transformer_engine_is_quoted() -> None:
    reason = "Transformer Engine does not load: OSError: libcudnn.so.9"
    lines = advice(without_te(reason), driver="580.1")
    assert lines[0] == reason
    assert "torch's CUDA (12.8)" in lines[1]
    assert "-e '.[te-cu12]'" in lines[2]


def test_a_driver_that_torch_does_not_use() -> None:
    here = replace(parse_hardware("cpu"), probed=True)
    assert "torch does not use it" in advice(here, driver="580.95")[0]
    assert "torch does not use it" not in advice(here, driver=None)[0]


def test_it_runs_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "probe", lambda: parse_hardware("cpu"))
    out = io.StringIO()
    assert doctor(Console(file=out, width=100)) == NOT_READY
    assert "torch" in out.getvalue() and "precision.emulate=true" in out.getvalue()

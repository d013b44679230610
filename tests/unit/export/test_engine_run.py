"""The engine's process, with a stand-in for its Python that says what a test wants."""

import json
import sys
from pathlib import Path

import pytest

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export import engine_run
from swiftfp8.export.engine_run import (
    Engine,
    EngineError,
    activation_group,
    find_engine,
    limit_for,
    mean_difference,
    prompt_tokens,
    run_engine,
)
from swiftfp8.export.layout import Layout

STAND_IN = """#!{python}
import json, os, sys
kind, out = sys.argv[2], sys.argv[-1]
answer = {probe!r} if kind == "probe" else [[-1.0] * (len(r) - 1) for r in json.load(open(sys.argv[3]))["rows"]]
if kind == "run" and {error!r}:
    sys.exit({error!r})
assert "PYTHONPATH" not in os.environ and os.environ["HF_HUB_OFFLINE"] == "1"
json.dump(answer, open(out, "w"))
"""  # noqa: E501
CPU = {"vllm": "9.9", "torch": "2.0", "device": "cpu", "amx": False}


def stand_in(folder: Path, probe: object = CPU, error: str = "") -> str:
    file = folder / "python"
    file.write_text(STAND_IN.format(python=sys.executable, probe=probe, error=error))
    file.chmod(0o755)
    return str(file)


def test_differences_are_means_over_all_tokens() -> None:
    assert mean_difference([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]]) == pytest.approx(0.5)


def test_the_engines_answer_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    engine = find_engine(stand_in(tmp_path))
    assert isinstance(engine, Engine) and engine.version == "9.9"
    found = run_engine(
        engine, tmp_path, [[1, 2, 3], [4, 5]], [[-1.0, -1.2], [-1.0]], [[-1.0, -1.0], [-1.3]]
    )
    assert (found.engine, found.prompts, found.tokens) == ("vLLM 9.9", 2, 3)
    assert found.mean_difference == pytest.approx(0.2 / 3)
    assert found.bf16_floor == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("x\nValueError: no such layer", "ValueError: no such layer"),
        ("RuntimeError: Unsupported FP8 MoE backend", "no CPU kernel for FP8 experts"),
    ],
)
def test_an_engine_that_fails_says_why(tmp_path: Path, error: str, said: str) -> None:
    engine = find_engine(stand_in(tmp_path, error=error))
    assert isinstance(engine, Engine)
    with pytest.raises(EngineError, match=said):
        run_engine(engine, tmp_path, [[1, 2]], [[-1.0]], [[-1.0]])


def test_a_python_without_vllm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="no vLLM in that environment"):
        find_engine(stand_in(tmp_path, probe={"vllm": None}))
    with pytest.raises(SwiftFP8Error, match="no such Python"):
        find_engine(str(tmp_path / "nothing"))


def test_the_real_worker_finds_no_vllm_here(tmp_path: Path) -> None:
    """The file itself, run by a Python that has no vLLM."""
    pytest.importorskip("torch")
    if find_engine(None).__class__ is Engine:
        pytest.skip("this environment has vLLM")
    with pytest.raises(SwiftFP8Error, match="no vLLM in that environment"):
        find_engine(sys.executable)
    assert "no vLLM in this environment" in str(find_engine(None))


def test_what_an_engine_can_not_run() -> None:
    slow = Engine(python="p", version="1", device="cpu", amx=False)
    fast = Engine(python="p", version="1", device="cpu", amx=True)
    assert "AMX" in str(slow.why_not("fp8_block")) and fast.why_not("fp8_block") is None
    assert slow.why_not("compressed_tensors") is None
    assert "no model" in str(fast.why_not("adapter"))


def test_limits_are_wide_where_activations_are_rounded() -> None:
    """Blocks too, on a GPU: only vLLM's CPU kernels multiply them in BF16."""
    cpu = Engine(python="p", version="1", device="cpu", amx=True)
    gpu = Engine(python="p", version="1", device="cuda", amx=False)
    names = ("bf16", "fp8_block", "compressed_tensors", "fp8", "modelopt")
    assert [limit_for(cpu, name) for name in names] == [0.02, 0.02, 0.1, 0.1, 0.1]
    assert [limit_for(gpu, name) for name in names] == [0.02, 0.1, 0.1, 0.1, 0.1]


def test_slow_kernels_get_few_tokens_or_none() -> None:
    cpu = Engine(python="p", version="1", device="cpu", amx=True)
    gpu = Engine(python="p", version="1", device="cuda", amx=False)
    assert prompt_tokens(gpu, "compressed_tensors", 10**11) == 256
    assert prompt_tokens(cpu, "fp8_block", 10**9) == 128
    assert prompt_tokens(cpu, "compressed_tensors", 10**6) == 128
    assert prompt_tokens(cpu, "compressed_tensors", 10**8) == 111
    assert "54 s a token" in str(prompt_tokens(cpu, "compressed_tensors", 10**9))


def test_activations_are_rounded_where_the_engine_does() -> None:
    cpu = Engine(python="p", version="1", device="cpu", amx=True)
    gpu = Engine(python="p", version="1", device="cuda", amx=False)
    served = {"fp8_block": 128, "compressed_tensors": 0, "fp8": 0, "modelopt": 0, "bf16": None}
    found = {}
    for name, group in served.items():
        layout = Layout(
            format=name,
            tensors=(),
            quantized=frozenset(),
            decisions=(),
            config=None,
            input_group=group,
        )
        found[name] = (activation_group(cpu, layout), activation_group(gpu, layout))
    assert found == {
        "fp8_block": (None, 128),
        "compressed_tensors": (0, 0),
        "fp8": (0, 0),
        "modelopt": (None, 0),
        "bf16": (None, None),
    }


def writing(folder: Path, probe: str, run: str = "") -> str:
    """A stand-in that writes these texts as its answers."""
    file = folder / "python"
    lines = [f"#!{sys.executable}", "import sys", f"texts = { ({'probe': probe, 'run': run})!r}"]
    file.write_text("\n".join([*lines, "open(sys.argv[-1], 'w').write(texts[sys.argv[2]])"]))
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("text", ["{bad", "[1, 2]", "{}", "null", '{"vllm": "1"}'])
def test_a_probe_that_answers_nonsense_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(SwiftFP8Error, match="can't be asked what it has: its answer is"):
        find_engine(writing(tmp_path, text))


@pytest.mark.parametrize("text", ["[[1]]", "NaN", "[]", "[[null, null]]", "[[-1.0]]", "{bad"])
def test_a_run_that_answers_nonsense_is_told(tmp_path: Path, text: str) -> None:
    engine = find_engine(writing(tmp_path, json.dumps(CPU), text))
    assert isinstance(engine, Engine)
    with pytest.raises(EngineError, match="its answer is no"):
        run_engine(engine, tmp_path, [[1, 2, 3]], [[-1.0, -1.0]], [[-1.0, -1.0]])


def test_a_python_that_hangs_is_asked_for_two_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_run._PROBE_TIMEOUT == 120
    monkeypatch.setattr(engine_run, "_PROBE_TIMEOUT", 0.2)
    file = tmp_path / "python"
    file.write_text("#!/bin/sh\nexec sleep 30\n")
    file.chmod(0o755)
    with pytest.raises(SwiftFP8Error, match="no answer within"):
        find_engine(str(file))

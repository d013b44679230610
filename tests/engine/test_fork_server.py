"""What the engine tier rests on: a call is a process of its own, and ends as it would elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import fork_server

pytestmark = pytest.mark.engine

SCRIPT = """
import os, sys
assert "decimal" in sys.modules and not hasattr(sys, "been_here")
sys.been_here = True
print(os.getpid(), *sys.argv[1:])
if "fail" in sys.argv:
    raise ValueError("as asked")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def python(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    with fork_server(tmp_path / "server", sys.executable, ["decimal"], os.environ) as python:
        yield str(python)


def call(python: str, folder: Path, *words: str, **changes: str) -> tuple[int, str, str]:
    environment = {**os.environ, **changes}
    command = [python, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_each_call_is_a_process_with_nothing_of_the_one_before(python: str, tmp_path: Path) -> None:
    first = call(python, tmp_path, "script.py", "0")
    second = call(python, tmp_path, "-m", "script", "3", "more")
    assert (first[0], second[0]) == (0, 3), (first, second)
    assert first[1].split()[0] != second[1].split()[0]
    assert second[1].split()[1:] == ["3", "more"]


def test_an_error_is_the_callers(python: str, tmp_path: Path) -> None:
    code, said, errors = call(python, tmp_path, "script.py", "0", "fail")
    assert code == 1 and said.split()[1:] == ["0", "fail"]
    assert errors.rstrip().endswith("ValueError: as asked")


def test_another_environment_than_the_servers_is_refused(python: str, tmp_path: Path) -> None:
    code, _, errors = call(python, tmp_path, "script.py", "0", PATH="/nowhere")
    assert code == 1 and "other values of ['PATH']" in errors


def test_a_server_with_threads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with fork_server(tmp_path / "server", sys.executable, ["threaded"], environment) as python:
        code, _, errors = call(str(python), tmp_path, "script.py", "0")
    assert code == 1 and "no fork server" in errors
    assert "imports started 1 threads" in (tmp_path / "server" / "server.log").read_text()

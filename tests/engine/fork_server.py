"""A Python that has done its imports: each call is a fork of it, a process of its own.

Importing vLLM takes ten times as long as running a tiny model in it. `fork_server` starts a server
that imports what it is told, and nothing else, and gives a stand-in for its Python: an executable
that takes `script arguments` or `-m module arguments`, has them run by a fresh fork with the
caller's files 0, 1 and 2, and ends with the fork's exit code. A fork shares imported code with its
siblings, and nothing that any of them loaded.

Forks are sound only while the server has one thread, which it makes sure of. What imports read from
the environment is settled by then, so a call must come with the environment of the server.

Standard library only: the server is run by any environment's Python.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PER_CALL = ("PYTEST_CURRENT_TEST",)
_CLIENT = """#!{python} -IS
import json, os, socket, sys
call = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}}
with socket.socket(socket.AF_UNIX) as server:
    try:
        server.connect({address!r})
        socket.send_fds(server, [b"0"], [0, 1, 2])
        server.sendall(json.dumps(call).encode() + b"\\n")
        code = int(server.makefile().readline())
    except (OSError, ValueError) as error:
        code = f"{{error!r}}: no fork server, see {log}"
sys.exit(code)
"""


@contextmanager
def fork_server(
    folder: Path, python: str, modules: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Path]:
    """The stand-in for `python`, in `folder`; usable at once, calls wait for the imports.

    `modules` are imported by the server; what it says goes to `folder`/server.log.
    """
    folder.mkdir()
    address, client, said = folder / "socket", folder / "python", folder / "server.log"
    client.write_text(_CLIENT.format(python=python, address=str(address), log=said), "utf-8")
    client.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener, said.open("wb") as log:
        listener.bind(str(address))
        listener.listen(64)
        server = subprocess.Popen(
            [python, __file__, str(listener.fileno()), str(client), *modules],
            env={key: value for key, value in environment.items() if key not in _PER_CALL},
            stdin=subprocess.PIPE,  # it ends when this end is closed, however this process ends
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    try:
        yield client
    finally:
        assert server.stdin
        server.stdin.close()
        server.wait(timeout=30)


def main() -> None:
    """Import, then fork for every call; only forks get past `_next_call`."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    environment = dict(os.environ)
    # What a fork starts by `sys.executable` is forked here as well.
    sys.executable = sys.argv[2]
    for module in sys.argv[3:]:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"imports started {len(threads) - 1} threads: forks may hang"
    gc.collect()
    gc.freeze()
    call = _next_call(listener, environment)
    try:
        _run(call["argv"], call["cwd"])
    except Exception:
        sys.excepthook(*sys.exc_info())
        _leave(1)
    _leave(0)


def _run(argv: list[str], folder: str) -> None:
    """As `python argv` does in `folder`."""
    os.chdir(folder)
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], folder
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        runpy.run_path(argv[0], run_name="__main__")


def _leave(code: int) -> None:
    """End at once: to take down all that was imported takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _next_call(listener: socket.socket, environment: dict[str, str]) -> dict[str, Any]:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks that answer
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os.killpg(0, signal.SIGKILL)
        caller, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _run_in_child(caller, environment)
        caller.close()


def _run_in_child(caller: socket.socket, environment: dict[str, str]) -> dict[str, Any]:
    """The call, in a child; this process waits for it and answers."""
    _, files, _, _ = socket.recv_fds(caller, 1, 3)
    call: dict[str, Any] = json.loads(caller.makefile().readline())
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        caller.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
        os._exit(0)
    caller.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    asked = call["environment"]
    settled = environment.items() & os.environ.items()  # all but what imports have changed
    different = sorted(dict(settled - asked.items()))
    assert not different, f"the server was started with other values of {different}"
    os.environ.clear()
    os.environ.update(asked)
    return call


if __name__ == "__main__":
    main()

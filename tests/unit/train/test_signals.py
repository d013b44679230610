"""Deaths of processes that prepare rows wait for the end of a step; no signal is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from swiftfp8.train.signals import WorkerDeaths


@pytest.fixture(autouse=True)
def _own_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_any_handler_hears_every_signal_when_it_comes() -> None:
    heard: list[int] = []

    def handler(number: int, _: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGCHLD, handler)
    deaths = WorkerDeaths()
    for step in (1, 2):
        with deaths.heard():
            pass
        signal.raise_signal(signal.SIGCHLD)
        assert len(heard) == step, "of the last step too"
    deaths.release()
    assert signal.getsignal(signal.SIGCHLD) is handler and len(heard) == 2


def test_what_a_handler_raises_waits_for_the_end_of_the_step_and_is_raised_once() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 1) is killed")

    signal.signal(signal.SIGCHLD, fail)
    deaths = WorkerDeaths()
    with deaths.heard():
        pass
    signal.raise_signal(signal.SIGCHLD)  # in the middle of a step
    with pytest.raises(RuntimeError, match="is killed"), deaths.heard():
        pytest.fail("the rows of the next step are not asked for")
    with deaths.heard():
        pass
    deaths.release()
    assert signal.getsignal(signal.SIGCHLD) is fail

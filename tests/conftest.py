"""Puts tests/ itself on the import path, for the helper modules beside this file."""

import signal

import pytest

from swiftfp8 import engine

# A shell's background job ignores Ctrl-C, and the programs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def te_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`precision.backend=auto` is Transformer Engine, whatever the default order is."""
    monkeypatch.setattr(engine, "AUTO_ENGINES", ("te",))

"""Puts tests/ itself on the import path, for the helper modules beside this file."""

import pytest

from swiftfp8 import engine


@pytest.fixture
def te_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`precision.backend=auto` is Transformer Engine, whatever the default order is."""
    monkeypatch.setattr(engine, "AUTO_ENGINES", ("te",))

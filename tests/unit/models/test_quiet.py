"""What is left of a library's messages."""

from __future__ import annotations

import logging

import pytest

from swiftfp8.models.quiet import told_once_of_retries


def test_retries_of_the_hubs_client_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    client = logging.getLogger("huggingface_hub.utils._http")
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    client.addHandler(handler)
    try:
        with told_once_of_retries("owner/name"):
            for number in (1, 2):
                client.warning("'no name' thrown while requesting HEAD https://hub")
                client.warning(f"Retrying in 1s [Retry {number}/5].")
            client.warning("something else")
        client.warning("Retrying in 1s")
    finally:
        client.removeHandler(handler)
    assert seen == ["something else", "Retrying in 1s"]
    said = capsys.readouterr().err
    assert said.startswith("owner/name: the hub does not answer") and said.count("\n") == 1

"""Rows from the Hugging Face hub or ModelScope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.quiet import told_once_of_retries


def read_hub(name: str, subset: str | None, split: str, hub: str) -> Sequence[Mapping[str, Any]]:
    """Download (or take from the cache) one split of a hub data set."""
    read = _from_modelscope if hub == "modelscope" else _from_hf
    return read(name, subset, split)


def stream_hub(
    name: str, subset: str | None, split: str, start: int
) -> Iterator[Mapping[str, Any]]:
    """Rows of one split on the Hugging Face hub after the first `start`, fetched as they come."""
    with _hf_errors(name):
        yield from _load_hf(name, subset, split=split, streaming=True).skip(start)


def _from_hf(name: str, subset: str | None, split: str) -> Sequence[Mapping[str, Any]]:
    with _hf_errors(name):
        return _load_hf(name, subset, split=split)


def _load_hf(*args: Any, **options: Any) -> Any:
    import datasets

    return datasets.load_dataset(*args, **options)


@contextmanager
def _hf_errors(name: str) -> Iterator[None]:
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HTTPError  # of the HTTP client that the hub uses

    try:
        with told_once_of_retries(name):
            yield
    except (OSError, ValueError, DatasetsError, HTTPError) as error:
        raise _unreachable(name, "Hugging Face", error, "hub=modelscope") from error


def _from_modelscope(name: str, subset: str | None, split: str) -> Sequence[Mapping[str, Any]]:
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise SwiftFP8Error(
            f"reading '{name}' from ModelScope needs the modelscope package",
            where="hub",
            fix="pip install 'swiftfp8[modelscope]', or hub=hf",
        ) from error
    try:
        found = MsDataset.load(name, subset_name=subset or "default", split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreachable(name, "ModelScope", error, "hub=hf") from error
    return found.to_hf_dataset() if hasattr(found, "to_hf_dataset") else list(found)


def _unreachable(name: str, hub: str, error: Exception, other: str) -> SwiftFP8Error:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return SwiftFP8Error(
        f"data set '{name}' can't be read from {hub}: {reason[:200]}",
        where="dataset",
        fix=f"check the id and the network, write a path with its suffix, or set {other}",
    )

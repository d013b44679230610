"""Libraries without their progress bars and reports: what matters of them is raised or logged."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and messages below errors, and put both back afterwards."""
    from transformers.utils import logging as messages

    verbosity = messages.get_verbosity()
    bars = messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        if bars:
            messages.enable_progress_bar()


@contextmanager
def told_once_of_retries(name: str) -> Iterator[None]:
    """One line in place of the hub client's two for every attempt, while `name` is fetched."""
    told: list[str] = []

    def without_attempts(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if "Retrying in" not in said and "thrown while requesting" not in said:
            return True
        if not told:
            told.append(f"{name}: the hub does not answer, trying again for half a minute")
            print(f"{told[0]} (HF_HUB_OFFLINE=1 does not wait)", file=sys.stderr)
        return False

    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addFilter(without_attempts)
    try:
        yield
    finally:
        logger.removeFilter(without_attempts)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Drop the warning that PEFT asks transformers by a name which is going to change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield

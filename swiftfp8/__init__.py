"""Fine-tune large language models in FP8, and export checkpoints that inference engines load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swiftfp8.api import SftArguments, Trainer

__version__ = "0.1.0"
__all__ = ["SftArguments", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the Python interface when it is first asked for, and not for the command line."""
    if name in ("SftArguments", "Trainer"):
        from swiftfp8 import api

        return getattr(api, name)
    raise AttributeError(f"module 'swiftfp8' has no attribute '{name}'")

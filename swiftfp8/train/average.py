"""An exponential moving average of the trained weights: what is evaluated, saved and exported.

    average = d average + (1 - d) weight        d = min(decay, (1 + step) / (10 + step))

after each optimizer step, in FP32. The first steps count for more, so that a short run is not
judged by the weights that it began with. Training itself goes on with the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

AVERAGE_FILE = "average.pt"


class WeightAverage(TrainerCallback):
    """The average of `parameters`, which is updated after each optimizer step."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self._weights = [parameter for parameter in parameters if parameter.requires_grad]
        self._decay = decay
        self._average = [weight.detach().float().clone() for weight in self._weights]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the step's weights in."""
        step = state.global_step
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        for average, weight in zip(self._average, self._weights, strict=True):
            average.lerp_(weight.detach().float(), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the model hold the average for a while; its weights come back bit for bit."""
        kept = [weight.detach().clone() for weight in self._weights]
        self._copy(self._average)
        try:
            yield
        finally:
            self._copy(kept)

    def save(self, folder: Path) -> None:
        """Write average and weights: the model's own files hold the average, rounded."""
        weights = [weight.detach() for weight in self._weights]
        torch.save({"average": self._average, "weights": weights}, folder / AVERAGE_FILE)

    def load(self, folder: Path) -> bool:
        """Go on from a checkpoint; False where it has no average, which then begins anew."""
        saved = load_weights_of(folder)
        if saved is None:
            self._average = [weight.detach().float().clone() for weight in self._weights]
            return False
        for average, value in zip(self._average, saved["average"], strict=True):
            average.copy_(value)
        self._copy(saved["weights"])
        return True

    @torch.no_grad()
    def _copy(self, values: list[torch.Tensor]) -> None:
        for weight, value in zip(self._weights, values, strict=True):
            weight.copy_(value)


def load_weights_of(folder: Path) -> dict[str, list[torch.Tensor]] | None:
    """What `save` wrote, or None."""
    if not (folder / AVERAGE_FILE).exists():
        return None
    saved: dict[str, list[torch.Tensor]] = torch.load(
        folder / AVERAGE_FILE, map_location="cpu", weights_only=True
    )
    return saved


@torch.no_grad()
def take_weights(parameters: Iterable[nn.Parameter], folder: Path) -> bool:
    """Go on with the weights of a checkpoint that has an average, without it."""
    saved = load_weights_of(folder)
    if saved is None:
        return False
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for weight, value in zip(trained, saved["weights"], strict=True):
        weight.copy_(value)
    return True

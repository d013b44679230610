"""In which order rows come, what a run must find unchanged to see them again, and what is counted.

The order depends on seed and epoch alone; a loader process leaves Ctrl-C to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from swiftfp8.config.absolute import with_absolute_paths
from swiftfp8.config.schema import Config
from swiftfp8.train.losses import targets
from swiftfp8.train.signals import ignore_interrupts

STREAM = "stream"  # in a checkpoint's manifest: the place of the last row
_STREAM_BATCHES = 8  # that wait for the training loop


class EpochSampler(Sampler[int]):
    """A permutation that depends on seed and epoch only, not on what else drew random numbers."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows = rows
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; accelerate's data loader calls this."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        yield from torch.randperm(self._rows, generator=generator).tolist()

    def __len__(self) -> int:
        return self._rows


def data_shape(rows: int | None, config: Config) -> dict[str, Any]:
    """What must be equal for a resumed run to see the same rows in the same order.

    `rows` is None of a stream, whose place is kept, however many rows a step takes.
    """
    if rows is None:
        return {
            "streaming": True,
            "dataset": list(with_absolute_paths(config).dataset),  # as resolved.yaml says it
            "shuffle_buffer": config.data.shuffle_buffer,
            "eval_rows": config.data.eval_rows,
            "seed": config.seed,
            "shuffle": config.data.shuffle,
            "packing": config.packing,
        }
    return {
        "streaming": False,
        "rows": rows,
        "batch_size": config.per_device_train_batch_size,
        "accumulation": config.gradient_accumulation_steps,
        "seed": config.seed,
        "shuffle": config.data.shuffle,
        "packing": config.packing,
    }


def stream_loader(
    rows: Any, collator: Any, *, batch_size: int, pin_memory: bool
) -> DataLoader[Any]:
    """Batches of a stream, which a process of their own tokenizes ahead."""
    return DataLoader(
        rows,
        batch_size=batch_size,
        collate_fn=collator,
        num_workers=1,  # which tokenizes
        prefetch_factor=_STREAM_BATCHES,
        pin_memory=pin_memory,
        worker_init_fn=WorkerStart(None),
        generator=torch.Generator(),  # its seed is not taken from what dropout goes by
    )


@dataclass(frozen=True)
class WorkerStart:
    """A data loader process's first act. (A class, so that it can be pickled.)"""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """Leave Ctrl-C alone, then do what was to be done."""
        ignore_interrupts()
        if self.then is not None:
            self.then(worker)


def count_tokens(batch: Any) -> torch.Tensor | int:
    """Tokens that are not padding. What a packed batch says of itself is taken out of it."""
    if "num_tokens" in batch:
        return batch.pop("num_tokens")
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else (mask != 0).sum()


def count_targets(batch: Any) -> torch.Tensor:
    """Tokens that are predicted, or their weights: labels not masked, but for each row's first."""
    weights = batch.get("loss_weights")
    return targets(batch["labels"][..., 1:], None if weights is None else weights[..., 1:])


def or_one(count: torch.Tensor) -> torch.Tensor:
    """A divisor: where nothing is counted, nothing is divided."""
    return torch.where(count == 0, torch.ones_like(count), count)

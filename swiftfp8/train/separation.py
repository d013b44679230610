"""Asks the model itself whether packed rows see each other.

`data/packing.py` relies on what a model makes of positions that restart and of the absent attention
mask. Most do it right; a model with code of its own, a convolution or a recurrent state may not,
and nothing but a worse result would show it. So before training two small sequences of packed rows
are run twice, with other tokens in the rows before one: that row's logits must not move. (What a
mask hides has weight exactly 0, so they are equal to the last bit where the device's kernels are
deterministic; a row that leaks moves them by tens of percent.)
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch

from swiftfp8 import inject
from swiftfp8.data.packing import PackCollator
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.plan import Plan

_LENGTHS = ((6, 5, 4), (3, 7, 5))  # of the rows in two sequences
_TOLERANCE = 1e-3  # of the largest logit


def require_separate_rows(model: Any, plan: Plan, collator: PackCollator) -> None:
    """Raise where a packed row's logits depend on other rows. Leaves no trace in the model.

    FP8 is off meanwhile: a scale for a whole tensor would tie rows together by itself.
    """
    changed = leak(model, plan, collator)
    if changed > _TOLERANCE:
        raise SwiftFP8Error(
            f"packed rows see each other in {type(model).__name__}: other tokens in one row move "
            f"the next one's logits by {changed:.0%}",
            where="packing",
            fix="set packing=false, or another attn_implementation",
        )


def leak(model: Any, plan: Plan, collator: PackCollator) -> float:
    """The largest change of a row's logits when the rows around it change, over the largest logit.

    For every row, the rows around it in the same sequence get other tokens.
    """
    packs = [_pack(lengths) for lengths in _LENGTHS]
    worst = 0.0
    with _as_it_was(model), torch.no_grad(), contextlib.ExitStack() as stack:
        if plan.compute_dtype == "bf16":
            stack.enter_context(torch.autocast(plan.device, dtype=torch.bfloat16))
        stack.enter_context(inject.forward_context(plan))
        before = _logits(model, plan, collator, packs)
        for row in range(len(_LENGTHS[0])):
            spans = [_span(lengths, row) for lengths in _LENGTHS]
            after = _logits(
                model, plan, collator, [_changed(p, s) for p, s in zip(packs, spans, strict=True)]
            )
            for k, (start, end) in enumerate(spans):
                difference = (before[k][start:end] - after[k][start:end]).abs().max()
                worst = max(worst, float(difference / before[k].abs().max()))
    return worst


def _pack(lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    positions = np.concatenate([np.arange(length) for length in lengths])
    ids = np.arange(len(positions)) * 7 % 50 + 3
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def _span(lengths: tuple[int, ...], row: int) -> tuple[int, int]:
    return sum(lengths[:row]), sum(lengths[: row + 1])


def _changed(pack: dict[str, np.ndarray], kept: tuple[int, int]) -> dict[str, np.ndarray]:
    ids = pack["input_ids"] + 50
    ids[slice(*kept)] -= 50
    return {**pack, "input_ids": ids}


def _logits(
    model: Any, plan: Plan, collator: PackCollator, packs: list[dict[str, np.ndarray]]
) -> list[torch.Tensor]:
    """Logits of each pack, [tokens, vocabulary]."""
    batch = collator(packs)
    inputs = {key: batch[key].to(plan.device) for key in ("input_ids", "position_ids")}
    logits = model(**inputs).logits.float()
    if collator.flatten:
        sizes = [len(pack["input_ids"]) for pack in packs]
        return list(logits[0, : sum(sizes)].split(sizes))
    return list(logits)


@contextlib.contextmanager
def _as_it_was(model: Any) -> Any:
    """Evaluation in high precision; afterwards all switches and counters stand as before."""
    switched = [(module, module.enabled) for _, module in inject.precision_linears(model)]
    training = model.training
    model.eval()
    inject.set_fp8_enabled(model, False)
    try:
        yield
    finally:
        for module, enabled in switched:
            module.enabled = enabled
        model.train(training)
        inject.reset_coverage(model)

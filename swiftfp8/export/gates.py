"""What an export may cost: figures against limits, each with its verdict.

Rounding to FP8 costs a small model more than a large one. The limits that hold where the user sets
none go by the number of parameters: those of `_SMALL` up to 1B, those of `_LARGE` from 7B on, and
between the two they move in proportion to the logarithm of the size.

Perplexity and loss have the same limit in both directions: an export that is far better on some
text than what was trained is no copy of it either. Few tokens tell little, so both count where they
are over the limit by more than their standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swiftfp8.config.schema import ExportConfig
from swiftfp8.export.fidelity import Fidelity
from swiftfp8.export.judge import TaskLoss


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest perplexity ratio and token KL, smallest top-1 agreement."""

    ppl_ratio: float
    kl: float
    top1: float


FIGURES = _PERPLEXITY, _KL, _TOP1 = ("perplexity ratio", "token KL", "top-1 agreement")
_SMALL_SIZE, _SMALL = 1e9, Limits(ppl_ratio=1.03, kl=0.06, top1=0.88)
_LARGE_SIZE, _LARGE = 7e9, Limits(ppl_ratio=1.01, kl=0.01, top1=0.97)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One figure against its limit, which it must not exceed, or (`at_least`) not fall below.

    With a `floor` it must lie between the two. `error` is the value's standard error.
    """

    figure: str
    value: float
    limit: float
    passed: bool
    at_least: bool = False
    percent: bool = False
    floor: float | None = None
    error: float = 0.0

    def __str__(self) -> str:
        limit = self._shown(self.limit)
        bound = f"at least {limit}" if self.at_least else f"at most {limit}"
        if self.floor is not None:
            bound = f"{self._shown(self.floor)} to {limit}"
        word = "passed" if self.passed else "MISSED"
        error = f" ± {self._shown(self.error)}" if self.error else ""
        return f"{self._shown(self.value)}{error} ({bound}): {word}"

    def _shown(self, value: float) -> str:
        return f"{value:.2%}" if self.percent else f"{value:.4f}".rstrip("0").rstrip(".")


def limits_for(parameters: int) -> Limits:
    """The limits for a model of this many parameters."""
    share = math.log(max(parameters, 1) / _SMALL_SIZE) / math.log(_LARGE_SIZE / _SMALL_SIZE)
    share = min(max(share, 0.0), 1.0)

    def between(small: float, large: float) -> float:
        return small + share * (large - small)

    return Limits(
        ppl_ratio=between(_SMALL.ppl_ratio, _LARGE.ppl_ratio),
        kl=between(_SMALL.kl, _LARGE.kl),
        top1=between(_SMALL.top1, _LARGE.top1),
    )


def judge_fidelity(
    fidelity: Fidelity, parameters: int, settings: ExportConfig
) -> tuple[Verdict, ...]:
    """Each figure against the user's limit, or the one for the model's size."""
    usual = limits_for(parameters)
    most = _or(settings.max_ppl_ratio, usual.ppl_ratio)
    return (
        _between(
            _PERPLEXITY,
            fidelity.perplexity_ratio,
            (1 / max(most, 1.0), most),
            fidelity.ratio_error,
        ),
        at_most(_KL, fidelity.token_kl, _or(settings.max_kl, usual.kl)),
        _at_least_percent(_TOP1, fidelity.top1_agreement, _or(settings.min_top1, usual.top1)),
    )


def judge_loss(loss: TaskLoss, settings: ExportConfig) -> Verdict:
    """By how much the loss on the training task may change through merging and export."""
    limit = settings.max_loss_increase
    figure = f"{loss.kind} loss"
    return _between(figure, loss.increase, (-limit, limit), loss.error, percent=True)


def at_most(figure: str, value: float, limit: float) -> Verdict:
    """A figure that must not exceed its limit; what is no number does."""
    return Verdict(figure=figure, value=value, limit=limit, passed=value <= limit)


def _between(
    figure: str, value: float, limits: tuple[float, float], error: float, *, percent: bool = False
) -> Verdict:
    return Verdict(
        figure=figure,
        value=value,
        limit=limits[1],
        floor=limits[0],
        passed=limits[0] - error <= value <= limits[1] + error,
        percent=percent,
        error=error,
    )


def _at_least_percent(figure: str, value: float, limit: float) -> Verdict:
    return Verdict(
        figure=figure, value=value, limit=limit, passed=value >= limit, at_least=True, percent=True
    )


def _or(asked: float | None, usual: float) -> float:
    return usual if asked is None else asked

"""Converted rows to tokens, with a report of what became of them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from swiftfp8.data.chat import TokenizeSettings, tokenize_rows
from swiftfp8.data.files import BadPlace
from swiftfp8.data.lengths import Pair
from swiftfp8.data.processes import count_processes
from swiftfp8.data.progress import tokenizing
from swiftfp8.data.reading import Converted
from swiftfp8.data.report import PartReport, bad_rows_error, count_reasons, in_order
from swiftfp8.data.task_rows import RelatedRows, TaskRows
from swiftfp8.data.task_tokens import tokenize_task
from swiftfp8.data.token_rows import TokenRows
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.tasks import Head

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config, DataConfig

log = logging.getLogger(__name__)


def tokenize_part(
    rows: Converted, tokenizer: Any, config: Config, name: str
) -> tuple[TokenRows, PartReport]:
    """Rows of language modelling; `name` is the key that errors are about.

    Raises:
        SwiftFP8Error: bad rows where they aren't skipped; no row left; what tokenize_rows raises.
    """
    settings = tokenize_settings(config)
    pairs: list[Pair] = []
    bad: list[BadPlace] = []
    dropped: Counter[str] = Counter()
    truncated = split = 0
    processes = count_processes(config.data.num_proc, rows.examples)
    with tokenizing(len(rows.examples)) as advance:
        for done in tokenize_rows(rows.examples, tokenizer, settings, processes=processes):
            pairs += done.fitted.pairs
            bad += done.bad
            dropped.update(done.fitted.dropped)
            truncated += done.fitted.truncated
            split += done.fitted.split
            advance(done.examples)
    settle_bad(bad, rows.total, config)
    if not pairs:
        raise _nothing_left(dropped, bad, name)
    if dropped:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in dropped.items())
        log.warning("left out %d rows of %s: %s", sum(dropped.values()), name, reasons)
    kept = TokenRows.of(pairs)
    return kept, PartReport(
        sources=rows.sources,
        rows=len(kept),
        tokens=int(kept.lengths.sum()),
        trained_tokens=kept.trained_tokens,
        longest=int(kept.lengths.max()),
        truncated=truncated,
        split=split,
        dropped=dict(dropped),
        skipped=count_reasons([*rows.bad, *bad]),
    )


def tokenize_task_part(
    rows: Converted,
    tokenizer: Any,
    config: Config,
    name: str,
    *,
    head: Head | None,
    pooling: str | None,
) -> tuple[TaskRows | RelatedRows, PartReport]:
    """Rows of the other tasks, as `tokenize_part`."""
    with tokenizing(len(rows.examples)) as advance:
        made = tokenize_task(rows.examples, tokenizer, config, head=head, pooling=pooling)
        advance(len(rows.examples))
    settle_bad(list(made.bad), rows.total, config)
    if made.rows is None:
        raise _nothing_left(Counter(made.dropped), list(made.bad), name)
    if made.dropped:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in made.dropped.items())
        log.warning("left out %d rows of %s: %s", sum(made.dropped.values()), name, reasons)
    _require_negatives(made.rows, config, name)
    return made.rows, PartReport(
        sources=rows.sources,
        rows=len(made.rows),
        tokens=made.tokens,
        trained_tokens=made.trained_tokens,
        longest=made.longest,
        truncated=made.truncated,
        split=0,
        dropped=dict(made.dropped),
        skipped=count_reasons([*rows.bad, *made.bad]),
    )


def _require_negatives(rows: TaskRows | RelatedRows, config: Config, name: str) -> None:
    """A text alone in its batch, without a negative, is told from nothing."""
    key = f"per_device_{'train' if name == 'dataset' else 'eval'}_batch_size"
    alone = getattr(config, key) == 1
    if isinstance(rows, RelatedRows) and alone and not rows.all_have_negatives:
        raise SwiftFP8Error(
            "rows without a negative take the other rows of their batch for it, and there are none",
            where=key,
            fix=f"set {key}=16 or more, or give each row a negative",
        )


def tokenize_settings(config: Config) -> TokenizeSettings:
    """What of the configuration matters to tokenizing."""
    return TokenizeSettings(
        max_length=config.max_length,
        truncation=config.data.truncation,
        system=config.system,
        whole=config.task == "pretrain" or config.data.loss_scale == "all",
        loss_scale=config.data.loss_scale,
        loss_weights=_weights(config.data),
    )


def _weights(data: DataConfig) -> dict[str, float]:
    """The weights, unless they are all 1, so that rows are held without."""
    weights = {str(name): weight for name, weight in data.loss_weights.items()}
    return {} if set(weights.values()) <= {1.0} else weights


def _nothing_left(dropped: Counter[str], bad: list[BadPlace], name: str) -> SwiftFP8Error:
    reasons = [f"{n} rows left out: {reason}" for reason, n in dropped.items()]
    reasons += [f"{n} bad rows: {reason}" for reason, n in count_reasons(bad).items()]
    return SwiftFP8Error(
        f"no row is left to use: {'; '.join(reasons) or 'every row is bad'}",
        where=name,
        fix="raise max_length, or correct the rows",
    )


def settle_bad(bad: list[BadPlace], total: int, config: Config) -> None:
    """Bad rows stop the job, or are named in one warning."""
    if bad and config.data.on_bad_row == "error":
        raise bad_rows_error(bad, total)
    if bad:
        reasons = ", ".join(f"{n} x {reason}" for reason, n in count_reasons(bad).items())
        first = in_order(bad)[0].where
        log.warning(
            "skipped %d bad rows of %d (%s); the first: %s", len(bad), total, reasons, first
        )

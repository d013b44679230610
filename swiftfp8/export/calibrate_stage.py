"""Calibration as a step of the export: find the rows, calibrate with progress, hand on the layout.

The rows are `export.calibration_dataset`, or else what the run was trained on: the text that the
export is for, at hand, and tokenized as in training. Text that the export is judged by must not
have chosen its rounding, so `export.fidelity_dataset` may not name the same data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from swiftfp8.config.schema import Config, DataConfig, ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate import WINDOW, Calibration, calibrate, calibration_text
from swiftfp8.export.clock import Clock
from swiftfp8.export.layout import Layout
from swiftfp8.export.locate import tokenizer_dir
from swiftfp8.export.run_rows import data_sets, rows_of_words
from swiftfp8.export.source import Source
from swiftfp8.export.staging import check_space


@dataclass(frozen=True, kw_only=True)
class CalibrationRows:
    """Token ids row by row, the token that opens a text (or None), and the seed of the draw."""

    rows: Sequence[Sequence[int]]
    first_token: int | None
    seed: int


@contextmanager
def calibrated(
    source: Source,
    layout: Layout,
    settings: ExportConfig,
    read_rows: Callable[[], CalibrationRows] | None,
    *,
    device: str = "cpu",
    console: Console | None = None,
    clock: Clock | None = None,
) -> Iterator[tuple[Layout, Calibration | None]]:
    """The layout with calibrated rounding, and what that gained; as it was, without `calibrate`.

    The calibrated weights are in a temporary folder for as long as the context lasts.

    Raises:
        SwiftFP8Error: no rows or too few, no disk space, a model that can't be calibrated.
    """
    if not settings.calibrate:
        yield layout, None
        return
    if read_rows is None:
        raise _no_rows()
    found = read_rows()
    text = calibration_text(
        found.rows,
        settings.calibration_tokens,
        seed=found.seed,
        first_token=found.first_token,
        longest=_longest(source),
    )
    with tempfile.TemporaryDirectory(prefix="swiftfp8-calibrate-") as folder:
        check_space(Path(folder), layout.nbytes)
        clock = clock or Clock()
        with clock.stage("calibrate"), _progress(console or Console()) as advance:
            quantizer, calibration = calibrate(
                source, layout, text, Path(folder), device=device, advance=advance
            )
        yield replace(layout, quantizer=quantizer), calibration


def read_calibration_rows(
    config: Config, model_dir: Path, adapter_dir: Path | None
) -> CalibrationRows:
    """Rows to calibrate on, tokenized as for training.

    Raises:
        SwiftFP8Error: no rows are named, they can't be read, or they are those of the fidelity
            check.
    """
    from swiftfp8.data.dataset import load_datasets
    from swiftfp8.models.checkpoint import read_config_json
    from swiftfp8.models.family import family_of
    from swiftfp8.models.source import ModelSource
    from swiftfp8.models.tokenizer import load_tokenizer

    own = config.export.calibration_dataset
    entries = own or config.dataset
    if not entries:
        raise _no_rows()
    _require_other_text(entries, config.export.fidelity_dataset)
    tokenizer = load_tokenizer(
        ModelSource(
            name=model_dir.name,
            path=tokenizer_dir(model_dir, adapter_dir),
            family=family_of(read_config_json(model_dir)),
            origin=str(model_dir),
        ),
        config.template,
        config.trust_remote_code,
    )
    data = replace(config.data, truncation="right", interleave_prob=[])
    reading = replace(
        config,
        dataset=list(entries),
        val_dataset=[],
        # held-out rows are for judging; rows named beside them have none
        split_dataset_ratio=0.0 if own or config.val_dataset else config.split_dataset_ratio,
        packing=False,
        data=DataConfig(on_bad_row=data.on_bad_row) if own else data,
    )
    rows = load_datasets(reading, tokenizer, 1, whole=True).train
    first_token = tokenizer.bos_token_id
    return CalibrationRows(
        rows=[list(map(int, ids)) for ids, _ in rows_of_words(rows)],
        first_token=first_token if isinstance(first_token, int) else None,
        seed=config.seed,
    )


def _no_rows() -> SwiftFP8Error:
    return SwiftFP8Error(
        "there are no rows to calibrate on",
        where="export.calibrate",
        fix="give a few hundred rows: export.calibration_dataset=[FILE] (a run has its own)",
    )


def _require_other_text(entries: Sequence[str], judged: Sequence[str]) -> None:
    shared = data_sets(entries) & data_sets(judged)
    if shared:
        raise SwiftFP8Error(
            f"{sorted(shared)[0]} would both choose the rounding and judge it",
            where="export.calibration_dataset, export.fidelity_dataset",
            fix="hold out other text for export.fidelity_dataset",
        )


def _longest(source: Source) -> int:
    """The longest window that the model takes."""
    positions = source.layers.config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else WINDOW


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("layers"), TimeRemainingColumn(), console=console) as shown:
        task = shown.add_task("calibrating", total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)

"""The reference's log-probabilities of all rows, computed once before training.

`tuner=full` changes the reference while it trains, so it has to be asked first; with LoRA it saves
a forward pass a step. The numbers are kept in the run directory: a resumed run reads them.
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swiftfp8 import inject
from swiftfp8.plan import Plan
from swiftfp8.train.objectives.prefer import answer_log_probs, as_reference
from swiftfp8.train.session import Session

REFERENCE_FILE = "reference.safetensors"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def add_reference(model: Any, datasets: Any, session: Session) -> Any:
    """`datasets` with `ref_logps` [rows, 2] in every part: of both of a row's sequences.

    Where FP8 is switched on later, `ref_logps_high` are those without it, for the steps before.
    The model must be what it is before training. Ctrl-C ends it, as nothing is trained yet.
    """
    parts = {"train": datasets.train, "eval": datasets.eval}
    parts = {name: rows for name, rows in parts.items() if rows is not None and len(rows)}
    path = session.run_dir / REFERENCE_FILE
    mark = _mark(parts, session.plan)
    known = _read(path, mark)
    if known is None:
        count = sum(len(rows) for rows in parts.values())
        session.display.note(f"the reference's log-probabilities of {count:,} rows, computed once")
        known = {}
        for value in _values(session.plan):
            inject.set_fp8_enabled(model, value != "ref_logps_high")
            known |= {
                f"{name} {value}": _of_rows(model, rows, datasets.collator, session)
                for name, rows in parts.items()
            }
        inject.set_fp8_enabled(model, True)
        part = path.with_name(f".tmp-{path.name}")
        save_file(known, str(part), metadata={"mark": mark})
        part.replace(path)
    added = {
        name: rows.with_values(
            **{value: known[f"{name} {value}"].numpy() for value in _values(session.plan)}
        )
        for name, rows in parts.items()
    }
    return replace(datasets, **added)


def _values(plan: Plan) -> tuple[str, ...]:
    late = plan.recipe is not None and plan.start_step > 0
    return ("ref_logps", "ref_logps_high") if late else ("ref_logps",)


def _of_rows(model: Any, rows: Any, collator: Any, session: Session) -> torch.Tensor:
    """[rows, 2] float32 on the CPU."""
    plan, step = session.plan, session.config.per_device_train_batch_size
    found = []
    with as_reference(model), _precision(plan):
        for start in range(0, len(rows), step):
            if session.stop.requested:
                raise KeyboardInterrupt
            stop = min(start + step, len(rows))
            batch = collator([rows[k] for k in range(start, stop)])
            batch = {name: value.to(plan.device) for name, value in batch.items()}
            first, second = answer_log_probs(model, batch).chunk(2)
            found.append(torch.stack([first, second], dim=1).float().cpu())
    inject.reset_coverage(model)
    return torch.cat(found)


@contextlib.contextmanager
def _precision(plan: Plan) -> Any:
    dtype = _AUTOCAST.get(plan.compute_dtype)
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast(plan.device, dtype=dtype))
        stack.enter_context(inject.forward_context(plan))
        yield


def _mark(parts: dict[str, Any], plan: Plan) -> str:
    """What the numbers depend on: the rows and the precision. (The run knows its base model.)"""
    digest = 0
    for part, rows in parts.items():
        # Where the parts are divided counts too: the same rows may be split otherwise.
        digest = zlib.crc32(f"{part} {len(rows)}".encode(), digest)
        for k in range(len(rows)):
            for name, value in sorted(rows[k].items()):
                digest = zlib.crc32(np.asarray(value).tobytes(), zlib.crc32(name.encode(), digest))
    recipe = plan.recipe.recipe if plan.recipe else "none"
    values = " ".join(_values(plan))
    return f"{digest:08x} {recipe} {plan.backend} {plan.compute_dtype} {values}"


def _read(path: Path, mark: str) -> dict[str, torch.Tensor] | None:
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            if (file.metadata() or {}).get("mark") != mark:
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:  # cut short: it is computed again
        return None

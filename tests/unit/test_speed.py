"""The expected time of a step against measured ones, and what the plan makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from swiftfp8 import speed
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.plan import Plan
from swiftfp8.speed import step_seconds
from tests.plan_kit import decoder_meta, plan_for, qwen_7b, qwen_half_b, qwen_one_and_a_half_b

pytestmark = pytest.mark.usefixtures("te_alone")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Milliseconds of a step on an H200, LoRA r=16 on all linears, and the job of it."""

    ms: float
    shape: str = "7b"
    batch: int = 4
    length: int = 2048
    dtype: str = "fp8"
    backend: str = "torch"
    checkpointing: str = "none"
    graphs: bool = False
    tuner: str = "lora"
    within: float = 0.15


# Add a row for each new measurement; `speed.RATES` is fitted to them.
MEASURED = [
    Measured(ms=306),
    Measured(ms=298.5, graphs=True),
    Measured(ms=365.8, batch=1, length=8192, graphs=True),
    Measured(ms=1088, batch=15, graphs=True),
    Measured(ms=110.8, shape="0.5b", length=1024),
    Measured(ms=25.8, shape="0.5b", length=1024, graphs=True),
    Measured(ms=331.6, checkpointing="selective"),
    Measured(ms=388.5, checkpointing="full", graphs=True),
    Measured(ms=501, backend="te"),
    Measured(ms=666.6, dtype="bf16"),
    Measured(ms=147.8, shape="0.5b", length=1024, dtype="bf16"),
    Measured(ms=128.4, shape="1.5b", tuner="full"),
    Measured(ms=249.7, shape="1.5b", tuner="full", backend="te"),
    Measured(ms=212.1, shape="1.5b", tuner="full", dtype="bf16"),
]


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_expected_times_are_near_the_measured_ones(row: Measured) -> None:
    meta = {"7b": qwen_7b, "1.5b": qwen_one_and_a_half_b, "0.5b": qwen_half_b}[row.shape]()
    plan = plan_for(
        "h200",
        meta,
        dtype=row.dtype,
        precision={"backend": row.backend},
        tuner=row.tuner,
        lora_rank=16,
        gradient_checkpointing=row.checkpointing,
        train={"cuda_graphs": row.graphs},
    )
    seconds = step_seconds(plan, meta, micro_batch=row.batch, max_length=row.length)
    assert seconds is not None and 1e3 * seconds == pytest.approx(row.ms, rel=row.within)


def small() -> Any:
    return decoder_meta(
        hidden=256, intermediate=512, layers=12, heads=4, kv_heads=4, vocab=1024, tied=True
    )


def said(plan: Plan) -> str:
    return " ".join(plan.notes)


def test_a_small_shape_is_noted_and_stays_in_fp8() -> None:
    plan = plan_for("h200", small(), max_length=128)
    assert plan.backend == "te"
    assert "precision.auto=true takes BF16" in said(plan)
    large = {"max_length": 2048, "per_device_train_batch_size": 4}
    assert "is expected" not in said(plan_for("h200", qwen_7b(), **large))


def test_auto_takes_bf16_where_fp8_would_be_slower() -> None:
    options = {"auto": True, "strict": True, "min_coverage": 0.5}
    plan = plan_for("h200", small(), max_length=128, precision=options)
    assert plan.recipe is None and plan.compute_dtype == "bf16" and plan.asked_dtype == "fp8"
    assert plan.notes[0].startswith("precision.auto=true took BF16")
    assert plan.min_coverage == 0.0 and not plan.fallbacks
    assert {layer.precision for layer in plan.layers} == {"bf16"}
    assert {layer.reason for layer in plan.layers} == {"precision.auto=true: see the note"}


def test_auto_leaves_fp8_where_it_is_faster() -> None:
    wanted, plain = (
        plan_for(
            "h200",
            qwen_7b(),
            max_length=2048,
            per_device_train_batch_size=4,
            precision={"auto": auto},
        )
        for auto in (True, False)
    )
    assert wanted == plain and wanted.backend == "te"


def test_auto_leaves_fp8_where_bf16_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {**speed.RATES, "te": replace(speed.RATES["te"], launch=1.0)}
    monkeypatch.setattr(speed, "RATES", slow)
    # 14.2 GiB of weights in BF16, 8.1 in FP8.
    plan = plan_for("x:9.0:14", qwen_7b(), max_length=128, precision={"auto": True})
    assert plan.backend == "te" and "BF16 would not fit" in said(plan)
    roomy = plan_for("x:9.0:40", qwen_7b(), max_length=128, precision={"auto": True})
    assert roomy.backend is None


@pytest.mark.parametrize(
    ("hardware", "options"),
    [("cpu", {"emulate": True}), ("h200", {"backend": "emulated"}), ("a100", {})],
)
def test_what_is_not_modelled_is_not_judged(hardware: str, options: dict[str, Any]) -> None:
    plan = plan_for(hardware, small(), precision=options | {"auto": True})
    assert "is expected" not in said(plan)


def test_a_mistake_is_reported_once() -> None:
    with pytest.raises(SwiftFP8Error, match="matches no linear"):
        plan_for("h200", small(), precision={"auto": True, "exclude": ["nothing"]})

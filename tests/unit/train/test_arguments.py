"""How large a step is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from task_kit import run_task, write_decoder

from swiftfp8.config.schema import Config
from swiftfp8.train.arguments import with_tokens_per_step
from swiftfp8.train.metrics import read_log


@pytest.mark.parametrize(
    ("wanted", "batch", "micro_batches"), [(4000, 2, 20), (4000, 3, 13), (150, 1, 2), (10, 8, 1)]
)
def test_as_many_micro_batches_as_come_nearest(wanted, batch, micro_batches):
    config = Config(train={"tokens_per_step": wanted}, per_device_train_batch_size=batch)
    made, said = with_tokens_per_step(config, tokens=100 * 77, rows=77)
    assert made == replace(config, gradient_accumulation_steps=micro_batches)
    assert said is not None and f"{micro_batches} micro-batches of {batch} rows" in said
    assert ("smaller per_device_train_batch_size" in said) == (wanted == 10)


def test_without_it_nothing_changes():
    config = Config(gradient_accumulation_steps=3)
    assert with_tokens_per_step(config, tokens=100, rows=1) == (config, None)


def test_a_run_steps_by_tokens_and_resumes_so(tmp_path):
    model = write_decoder(tmp_path / "model")
    options = {"task": "seq_cls", "dtype": "fp32", "per_device_train_batch_size": 2}
    brief = {"logging_steps": 1, "eval_steps": 0, "tokens_per_step": 60}
    result, shown = run_task(tmp_path, model, "label", **options, max_steps=4, train=brief)
    assert "train.tokens_per_step=60: " in shown
    manifest = json.loads((result.run_dir / "last" / "swiftfp8.json").read_text())
    count = manifest["data"]["accumulation"]
    assert count > 1 and f"{count} micro-batches of 2 rows" in shown
    last = result.run_dir / "checkpoint-3"
    again, shown = run_task(
        tmp_path, model, "label", name=result.run_dir.name, resume_from_checkpoint=str(last),
        **options, max_steps=4, train=brief,
    )  # fmt: skip
    assert "WARNING" not in shown and "changed since" not in shown
    assert len(read_log(again.run_dir)) == 5  # four steps, and the evaluation at the end

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_kit import tiny_llama
from peft import PeftModel
from train_kit import VOCAB, Rows, make_config, make_model, make_rows, pad, train
from transformers import AutoModelForCausalLM

from swiftfp8.config.schema import DataConfig, GuardConfig, OptimConfig
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.inject import precision_linears, scaling_state
from swiftfp8.plan import RecipeOptions
from swiftfp8.precision import emulated
from swiftfp8.train import trainer
from swiftfp8.train.arguments import training_arguments
from swiftfp8.train.guard import total_norm
from swiftfp8.train.metrics import read_log
from swiftfp8.train.trainer import run_training


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_log(run_dir) if "loss" in line}


def test_the_loss_falls_and_the_log_is_complete(tmp_path):
    config = make_config(max_steps=20, learning_rate=2e-2, train={"logging_steps": 5})
    result, shown = train(tmp_path, config, rows=make_rows(12, 4))
    lines = read_log(tmp_path)
    assert [line["step"] for line in lines] == [1, 5, 10, 15, 20, 20]
    keys = "step epoch loss learning_rate grad_norm tokens_per_second mfu "
    keys += "data_wait_ms peak_memory_gib time"
    assert list(lines[0]) == keys.split()
    assert list(lines[-1]) == ["step", "epoch", "eval_loss", "time"]
    assert result.first_loss == lines[0]["loss"]
    assert result.last_loss == lines[-2]["loss"] < 0.9 * result.first_loss
    assert result.eval_loss == lines[-1]["eval_loss"]
    assert (result.steps, result.interrupted) == (20, False)
    assert result.last_checkpoint == tmp_path / "checkpoint-20"
    assert "step 5/20  loss" in shown
    assert sorted(os.listdir(tmp_path)) == [
        "best",
        "checkpoint-20",
        "last",
        "logging.jsonl",
        "precision_report.json",
        "result.json",
    ]


@pytest.mark.parametrize("fp8", [False, True])
def test_the_same_seed_gives_identical_losses_and_another_does_not(tmp_path, fp8):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(tmp_path / name, make_config(seed=seed), fp8=fp8, dropout=0.1)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_accumulated_micro_batches_weigh_by_tokens(tmp_path):
    # Rows differ in length: a mean of micro-batch means would give another gradient.
    train(tmp_path / "one", make_config(per_device_train_batch_size=4, max_steps=3))
    split = make_config(per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=3)
    train(tmp_path / "four", split)
    for one, four in zip(read_log(tmp_path / "one"), read_log(tmp_path / "four"), strict=True):
        # FP32 sums in another order.
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_a_batch_without_a_single_target_has_no_loss(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 4
    result, _ = train(
        tmp_path, make_config(max_steps=2), rows=Rows(train=rows, eval=rows, collator=pad)
    )
    assert (result.last_loss, result.eval_loss) == (0.0, 0.0)


def test_evaluation_is_the_mean_over_tokens(tmp_path):
    rows = make_rows(4, 5)
    result, _ = train(
        tmp_path,
        make_config(max_steps=1, warmup_ratio=1.0, per_device_eval_batch_size=2),
        rows=rows,
    )
    model, total, count = tiny_llama(hidden=64).eval(), 0.0, 0  # a first step warms up: lr 0
    for row in rows.eval:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        logits = model(ids).logits[0, :-1].detach()
        chosen = labels[1:] != -100
        total += torch.nn.functional.cross_entropy(
            logits[chosen], labels[1:][chosen], reduction="sum"
        ).item()
        count += int(chosen.sum())
    assert result.eval_loss == pytest.approx(total / count, rel=1e-5)


def test_evaluation_leaves_delayed_scaling_as_training_left_it(tmp_path, monkeypatch):
    record = emulated._AmaxHistory.amax

    def record_always(self, x, **_):  # as Transformer Engine does, in evaluation too
        return record(self, x, record=True)

    monkeypatch.setattr(emulated._AmaxHistory, "amax", record_always)
    rows = make_rows(8, 4)
    recipe = RecipeOptions(recipe="fp8_delayed", amax_history_len=4)
    left = []
    for eval_steps in (0, 1):
        model, plan = make_model(fp8=True, recipe=recipe)
        for _, module in precision_linears(model):
            module.recipe = module.x_history.recipe = module.dy_history.recipe = recipe
        config = make_config(max_steps=3, train={"eval_steps": eval_steps, "save_steps": 0})
        folder = tmp_path / str(eval_steps)
        train(folder, config, rows=rows, model=(model, plan))
        left.append((losses(folder), scaling_state(model)))
    assert left[0][0] == left[1][0]
    assert left[0][1] and left[0][1].keys() == left[1][1].keys()
    assert all(torch.equal(state, left[1][1][name]) for name, state in left[0][1].items())


def test_clipping_changes_the_step_but_not_the_logged_norm(tmp_path):
    first = {}
    for name, norm in (("off", 0.0), ("loose", 1e9), ("tight", 1e-4)):
        options = {"max_steps": 2, "warmup_ratio": 0.0, "learning_rate": 1e-1}
        optim = OptimConfig(adam_epsilon=1.0)  # makes Adam's step depend on the gradient's size
        train(tmp_path / name, make_config(max_grad_norm=norm, optim=optim, **options))
        first[name] = read_log(tmp_path / name)
    assert losses(tmp_path / "off") == losses(tmp_path / "loose")
    assert first["tight"][1]["loss"] != first["off"][1]["loss"]
    assert first["tight"][0]["grad_norm"] == first["off"][0]["grad_norm"] > 1e-3


def test_the_norm_of_bf16_gradients_is_exact():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(65, 3, generator=generator).bfloat16() for _ in range(5)]
    exact = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    # BF16 itself would round to 1 in 256.
    assert total_norm(gradients).item() == pytest.approx(exact, rel=1e-6)


def test_schedules_warm_up_and_end_where_they_should(tmp_path):
    optim = OptimConfig(lr_scheduler_type="cosine_with_min_lr", min_lr_ratio=0.25)
    config = make_config(max_steps=20, warmup_ratio=0.2, learning_rate=1e-3, optim=optim)
    train(tmp_path, config)
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    assert rates[:5] == pytest.approx([0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert rates[-1] == pytest.approx(2.5e-4, rel=0.03)  # one step before the schedule's end
    assert min(rates[5:]) >= 2.5e-4


def test_epochs_end_after_the_last_incomplete_step(tmp_path):
    config = make_config(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    result, _ = train(tmp_path, config, rows=make_rows(10))
    assert result.steps == 6  # five micro-batches: two full steps and a short one, twice


def test_every_row_is_seen_once_an_epoch_in_another_order(tmp_path):
    seen: list[int] = []
    rows = make_rows(6)

    def collate(batch):
        seen.extend(rows.train.index(row) for row in batch)
        return pad(batch)

    spied = Rows(train=rows.train, eval=None, collator=collate)
    train(tmp_path / "a", make_config(per_device_train_batch_size=1, max_steps=12), rows=spied)
    assert sorted(seen[:6]) == sorted(seen[6:12]) == list(range(6))
    assert seen[:6] != seen[6:12]
    seen.clear()
    config = make_config(per_device_train_batch_size=1, max_steps=6, data=DataConfig(shuffle=False))
    train(tmp_path / "b", config, rows=spied)
    assert seen[:6] == list(range(6))


def test_best_is_the_lowest_evaluation_among_checkpoints(tmp_path):
    # The rate is far too high: evaluation gets worse after a while.
    config = make_config(
        max_steps=10,
        learning_rate=0.3,
        warmup_ratio=0.0,
        max_grad_norm=0.0,
        train={"save_steps": 1, "eval_steps": 3, "save_total_limit": 1},
    )
    result, _ = train(tmp_path, config, rows=make_rows(12, 4))
    evals = {line["step"]: line["eval_loss"] for line in read_log(tmp_path) if "eval_loss" in line}
    assert sorted(evals) == list(range(1, 11))  # each checkpoint has one
    best = min(evals, key=evals.get)
    assert result.best_checkpoint == tmp_path / f"checkpoint-{best}"
    kept = {int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")}
    assert kept == {best, 10} | {max(set(range(1, 10)) - {best})}


def test_the_adapter_loads_in_plain_peft(tmp_path):
    model, plan = make_model()
    result, _ = train(tmp_path, make_config(learning_rate=2e-2), model=(model, plan))
    plain = PeftModel.from_pretrained(tiny_llama(hidden=64), result.last_checkpoint).eval()
    ids = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        difference = plain(ids).logits - model.eval()(ids).logits
        untouched = plain(ids).logits - tiny_llama(hidden=64)(ids).logits
    assert difference.abs().max() < 1e-5  # the same FP32 products in another order
    assert untouched.abs().max() > 1e-2


@pytest.mark.parametrize("fp8", [False, True])
def test_a_full_checkpoint_is_a_plain_model(tmp_path, fp8):
    model, plan = make_model("full", fp8=fp8)
    result, _ = train(tmp_path, make_config(), model=(model, plan))
    plain = AutoModelForCausalLM.from_pretrained(result.last_checkpoint)
    own = model.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, own[name]), name
    start = tiny_llama(hidden=64).state_dict()["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(own["model.layers.0.mlp.up_proj.weight"], start)


def test_fp8_starts_at_its_step_and_coverage_is_measured(tmp_path):
    model, plan = make_model(fp8=True, start_step=3)
    train(tmp_path, make_config(max_steps=5), model=(model, plan))
    linears = [module for _, module in precision_linears(model)]
    # Counted since the switch: the fourth and fifth step, FP8 throughout.
    assert {(module.ran_fp8, module.ran_high) for module in linears} == {(2, 0)}
    report = (tmp_path / "precision_report.json").read_text()
    assert '"kept": 1.0' in report


def test_coverage_below_the_minimum_fails_the_run(tmp_path):
    with pytest.raises(RunFailed, match="min_coverage") as caught:
        train(tmp_path, make_config(), min_coverage=0.5)
    assert caught.value.exit_code == 1


def test_fp8_that_would_never_switch_on_is_a_mistake(tmp_path):
    model = make_model(fp8=True, start_step=6)
    with pytest.raises(SwiftFP8Error, match="FP8 would never run") as caught:
        train(tmp_path, make_config(max_steps=6), model=model)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_spoilt_weight_stops_the_first_step_by_name(tmp_path):
    model, plan = make_model()
    name = "model.layers.1.self_attn.q_proj"
    with torch.no_grad():
        model.get_submodule(f"base_model.model.{name}").base_layer.weight[0, 0] = float("nan")
    before = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(RunFailed) as caught:
        train(tmp_path, make_config(warmup_ratio=0.0), model=(model, plan))
    text = str(caught.value)
    assert "step 1" in text
    assert name in text
    assert "no checkpoint was saved yet" in text
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in before.items())  # the step was not taken


def test_a_diverged_run_stops_and_names_the_last_good_checkpoint(tmp_path):
    config = make_config(
        max_steps=30, learning_rate=1e25, warmup_ratio=0.0, train={"save_steps": 1}
    )
    with pytest.raises(RunFailed, match="is not finite at step") as caught:
        train(tmp_path, config)
    step = int(str(caught.value).split("at step ")[1].split(":")[0])
    assert f"the last good checkpoint is checkpoint-{step - 1}" in str(caught.value)
    assert f"resume_from_checkpoint={tmp_path / f'checkpoint-{step - 1}'}" in str(caught.value)
    assert all(math.isfinite(value) for value in losses(tmp_path).values())


def test_the_guard_can_be_told_to_go_on(tmp_path):
    config = make_config(
        max_steps=6,
        learning_rate=1e25,
        warmup_ratio=0.0,
        guard=GuardConfig(on_nonfinite="ignore"),
    )
    result, _ = train(tmp_path, config)
    assert result.steps == 6
    assert losses(tmp_path)[6] is None


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"tuner": "full"}, ["tuner is full, was lora"]),
        ({"model_name": "other"}, ["model is other, was tiny"]),
    ],
)
def test_resuming_another_job_is_refused_and_says_what_differs(tmp_path, now, named):
    train(tmp_path, make_config())
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(SwiftFP8Error) as caught:
        train(tmp_path, make_config(), resume=tmp_path, **now)
    assert caught.value.exit_code == 2
    assert all(text in str(caught.value) for text in named)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("from_step", [1, 3])
def test_fp16_that_never_takes_a_step_is_no_success(tmp_path, monkeypatch, from_step):
    def scaled(*arguments):  # accelerate has no FP16 on a CPU; the scaler's part is played here
        made = training_arguments(*arguments)
        made.fp16 = True
        return made

    monkeypatch.setattr(trainer, "training_arguments", scaled)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    model, plan = make_model()
    weight = next(p for p in model.parameters() if p.requires_grad)
    steps = iter(range(1, 100))
    weight.register_hook(lambda g: g * math.inf if next(steps) >= from_step else g)
    config = make_config(max_steps=4)
    if from_step > 1:
        assert train(tmp_path, config, model=(model, plan))[0].steps == 4
        return
    with pytest.raises(RunFailed, match="skipped each of 4 steps") as caught:
        train(tmp_path, config, model=(model, plan))
    assert caught.value.exit_code == 1 and (tmp_path / "checkpoint-4").is_dir()


def test_going_back_starts_another_course_from_there(tmp_path):
    config = make_config(max_steps=6, train={"save_steps": 2, "save_total_limit": 9})
    train(tmp_path, config, rows=make_rows(12, 3))
    shorter = make_config(max_steps=3, train={"save_steps": 2})
    result, _ = train(tmp_path, shorter, rows=make_rows(12, 3), resume=tmp_path / "checkpoint-2")
    assert result.steps == 3
    assert sorted(losses(tmp_path)) == [1, 2, 3]
    assert result.last_checkpoint == tmp_path / "checkpoint-3"
    assert (tmp_path / "superseded-checkpoint-4").is_dir()
    assert os.readlink(tmp_path / "last") == "checkpoint-3"


def test_a_finished_run_has_nothing_left_to_train(tmp_path):
    first, _ = train(tmp_path, make_config())
    again, shown = train(tmp_path, make_config(), resume=tmp_path)
    assert "nothing is left" in shown
    assert (again.steps, again.last_loss) == (first.steps, first.last_loss)
    longer, _ = train(tmp_path, make_config(max_steps=8), resume=tmp_path)
    assert sorted(losses(tmp_path)) == list(range(1, 9))
    assert longer.steps == 8


def test_other_data_on_a_resume_is_said(tmp_path):
    train(tmp_path, make_config(max_steps=3))
    changed = make_config(max_steps=5, per_device_train_batch_size=3)
    _, shown = train(tmp_path, changed, resume=tmp_path)
    assert "batch_size 2 -> 3" in shown


def test_a_full_disk_fails_the_run_and_keeps_what_was_saved(tmp_path, monkeypatch):
    real, calls = torch.save, []

    def save(value, file, *args, **kwargs):
        calls.append(str(file))
        if "checkpoint-4" in str(file):
            raise OSError(28, "No space left on device")
        return real(value, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(RunFailed, match="No space left") as caught:
        train(tmp_path, make_config(train={"save_steps": 2}))
    assert "checkpoint-2 is intact" in str(caught.value)
    assert not list(tmp_path.glob(".tmp-*"))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2"}


def test_an_unforeseen_fault_is_a_failed_run_with_the_way_back(tmp_path):
    rows, count = make_rows(), 0

    def collate(batch):
        nonlocal count
        count += 1
        if count > 4:
            raise ValueError("row of sand")
        return pad(batch)

    config = make_config(train={"save_steps": 1, "images": True})
    with pytest.raises(RunFailed, match="row of sand") as caught:
        train(tmp_path, config, rows=Rows(train=rows.train, eval=None, collator=collate))
    assert "resume_from_checkpoint=" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert (tmp_path / "images" / "loss.png").exists()


def test_mistakes_found_before_training_leave_nothing(tmp_path):
    model, plan = make_model()
    empty = Rows(train=[], eval=None, collator=pad)
    with pytest.raises(SwiftFP8Error, match="empty"):
        run_training(model, None, empty, plan, make_config(), tmp_path)
    with pytest.raises(SwiftFP8Error, match="report_to"):
        run_training(model, None, make_rows(), plan, make_config(report_to=["comet"]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_what_is_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, make_config(max_steps=3, report_to=["tensorboard"]), rows=make_rows(6, 2))
    (events,) = (tmp_path / "runs").rglob("events.out.*")
    reader = EventAccumulator(str(events))
    reader.Reload()
    tags = set(reader.Tags()["scalars"])
    assert {"train/loss", "train/grad_norm", "train/tokens_per_second", "eval/loss"} <= tags
    written = [round(event.value, 4) for event in reader.Scalars("train/loss")]
    assert written == [round(value, 4) for value in losses(tmp_path).values()]


def test_loader_processes_change_nothing(tmp_path):
    train(tmp_path / "a", make_config(max_steps=3))
    config = make_config(max_steps=3, data=DataConfig(num_workers=1))
    train(tmp_path / "b", config)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_rows_stay_within_the_vocabulary():
    assert max(max(row["input_ids"]) for row in make_rows(50).train) < VOCAB


def test_the_log_says_how_long_a_step_waited_for_its_rows(tmp_path):
    rows = make_rows()

    def slow(batch):
        time.sleep(0.03)
        return rows.collator(batch)

    train(tmp_path, make_config(max_steps=4), rows=replace(rows, collator=slow))
    waits = [line["data_wait_ms"] for line in read_log(tmp_path)]
    assert len(waits) == 4 and min(waits) >= 28

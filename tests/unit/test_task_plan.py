"""What can't work is said before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plan_kit import plan_for, qwen_half_b

from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.meta import LinearMeta
from swiftfp8.precision.high import compute_in_float32
from swiftfp8.report.plan_table import precision_report
from swiftfp8.tasks import TASK_FILE, Head, read_task_file, task_notes

HEAD = Head(num_labels=3, problem_type="single_label_classification", labels=("a", "b", "c"),
            reason="3 labels (a, b, c): each row has one label")  # fmt: skip


def classifier():
    """Qwen2.5-0.5B's shape with a score in place of its head."""
    meta = qwen_half_b()
    score = LinearMeta(
        name="score", in_features=896, out_features=3, bias=False, kind="score", layer=None
    )
    linears = (*meta.linears[:-1], score)
    return replace(meta, linears=linears, head=HEAD, head_modules=("score",), tied_head=False)


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        ({"task": "dpo", "packing": True}, "rows can't be packed", "packing=false"),
        ({"task": "dpo", "tuner": "full"}, "which tuner=full changes", "precompute_ref=true"),
        ({"task": "dpo", "num_labels": 2}, "no labels of its own", "task=seq_cls"),
        ({"problem_type": "regression"}, "no labels of its own", "task=seq_cls"),
        ({"task": "dpo", "precision": {"head": "fp8"}}, "an FP8 head runs", "head=bf16"),
        ({"task": "dpo", "rlhf": {"label_smoothing": 0.1}}, "not by sigmoid", "loss_type=simpo"),
        (
            {"task": "dpo", "rlhf": {"loss_type": "ipo", "desirable_weight": 2.0}},
            "not by ipo",
            "loss_type=kto",
        ),
        ({"rlhf": {"loss_type": "kto"}}, "and this is task=sft", "set task=dpo"),
        ({"rlhf": {"beta": 0.5}}, "rlhf.beta is read by task=dpo", "set task=dpo"),
        ({"task": "reward", "rlhf": {"precompute_ref": True}}, "rlhf.precompute_ref", "task=dpo"),
        (
            {"task": "dpo", "rlhf": {"center_rewards_coefficient": 0.1}},
            "is read by task=reward",
            "set task=reward",
        ),
    ],
)
def test_combinations_that_can_not_work(options, what, fix):
    with pytest.raises(SwiftFP8Error) as caught:
        plan_for("h200", **options)
    assert what in str(caught.value) and fix in str(caught.value)


@pytest.mark.parametrize("loss", ["orpo", "simpo"])
def test_losses_without_a_reference_train_in_full(loss):
    plan = plan_for("h200", task="dpo", tuner="full", rlhf={"loss_type": loss})
    assert plan.task == "dpo"


def test_a_score_is_trained_in_high_precision_beside_the_adapter():
    plan = plan_for("h200", classifier(), task="seq_cls", dtype="fp8")
    score = plan.layers[-1]
    assert (score.precision, score.trainable, score.lora) == ("fp32", True, False)
    assert "score head" in score.reason
    assert plan.lora.modules_to_save == ("score",) and plan.lora.task_type == "SEQ_CLS"
    assert plan.decoder_coverage == 1.0 and not plan.loss.fused
    assert HEAD.reason in plan.notes
    assert any("trained whole, in FP32: score" in note for note in plan.notes)


def test_a_score_is_in_fp32_where_nothing_else_is_and_the_report_says_so():
    plan = plan_for("a100", classifier(), task="seq_cls", dtype="bf16", tuner="full")
    report = precision_report(plan)["layers"]
    assert (report["score"]["precision"], report["score"]["trainable"]) == ("fp32", True)
    assert "FP32" in report["score"]["reason"]
    others = {told["precision"] for name, told in report.items() if name != "score"}
    assert others == {"bf16"}
    linear = torch.nn.Linear(8, 3).bfloat16()
    compute_in_float32(linear)  # as the run does with it
    assert linear(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_few_labels_take_less_memory_than_a_vocabulary():
    sft = plan_for("h200", gradient_checkpointing="none", train={"fused_loss": "off"})
    labels = plan_for("h200", classifier(), task="seq_cls", gradient_checkpointing="none")
    assert labels.memory.logits < 0.01 < sft.memory.logits


def test_two_answers_of_a_row_are_in_memory_together():
    sft = plan_for("h200", per_device_train_batch_size=4)
    dpo = plan_for("h200", per_device_train_batch_size=2, task="dpo")
    assert dpo.memory.total == pytest.approx(sft.memory.total)
    assert dpo.memory.largest_micro_batch == sft.memory.largest_micro_batch // 2


@pytest.mark.parametrize(("encoder", "pooling"), [(True, "mean"), (False, "last_token")])
def test_pooling_goes_by_the_model(encoder, pooling):
    meta = replace(qwen_half_b(), encoder=encoder)
    assert plan_for("h200", meta, task="embedding").pooling == pooling
    chosen = plan_for("h200", meta, task="embedding", embedding={"pooling": "cls"})
    assert chosen.pooling == "cls"
    assert plan_for("h200").pooling is None


def test_notes_say_what_may_not_have_been_meant():
    kto = Config(task="dpo", rlhf={"loss_type": "kto"})
    assert any("per_device_train_batch_size" in note for note in task_notes(kto))
    assert any("adapter off" in note for note in task_notes(Config(task="dpo")))
    useless = Config(task="dpo", rlhf={"loss_type": "orpo", "precompute_ref": True})
    assert any("does nothing" in note for note in task_notes(useless))
    assert task_notes(Config()) == []


def test_a_damaged_task_file_is_the_user_s_to_mend(tmp_path):
    assert read_task_file(tmp_path) is None
    (tmp_path / TASK_FILE).write_text('{"task": "seq_cls"}')
    with pytest.raises(SwiftFP8Error, match="can't be read"):
        read_task_file(tmp_path)


def test_a_task_without_words_has_no_loss_to_fuse_and_says_so():
    plan = plan_for("h200", classifier(), task="seq_cls")
    assert plan.loss.reason == "task=seq_cls has no logits over words"
    with pytest.raises(SwiftFP8Error, match="task=seq_cls has no logits over words"):
        plan_for("h200", classifier(), task="seq_cls", train={"fused_loss": "on"})

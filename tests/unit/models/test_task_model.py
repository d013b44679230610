"""Heads, positions and classes of models that are no language models."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    ModernBertConfig,
    Qwen3Config,
    RobertaConfig,
)

from swiftfp8.models.task_model import (
    auto_class_of,
    head_modules,
    is_encoder,
    set_head,
    task_kind,
    usable_positions,
)
from swiftfp8.tasks import TASKS, Head

HEAD = Head(num_labels=3, problem_type="single_label_classification", labels=("a", "b", "c"),
            reason="by hand")  # fmt: skip
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 48, "pad_token_id": 1}  # fmt: skip


def on_meta(config):
    set_head(config, HEAD, pad_token_id=1)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize(
    ("config", "heads", "encoder"),
    [
        (BertConfig(**SMALL), ("classifier",), True),
        (RobertaConfig(**SMALL), ("classifier",), True),
        (
            DistilBertConfig(vocab_size=50, dim=32, n_heads=2, n_layers=1, hidden_dim=48),
            ("pre_classifier", "classifier"),
            True,
        ),
        (ModernBertConfig(**SMALL), ("head", "classifier"), True),
        (LlamaConfig(**SMALL, num_key_value_heads=2), ("score",), False),
        (Qwen3Config(**SMALL, num_key_value_heads=2), ("score",), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_head_is_what_stands_beside_the_base(config, heads, encoder):
    model = on_meta(config)
    assert head_modules(model) == heads
    assert is_encoder(config) is encoder
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"} and model.config.num_labels == 3
    kinds = {
        task_kind(name, heads, TASKS["seq_cls"])
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert {None, "score"} <= kinds <= {None, "score", "pooler"}


def test_positions_that_are_counted_from_the_padding_are_fewer():
    roberta = on_meta(RobertaConfig(**SMALL, max_position_embeddings=130))
    assert usable_positions(roberta, 130) == 128
    bert = on_meta(BertConfig(**SMALL, max_position_embeddings=130))
    assert usable_positions(bert, 130) == 130


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3ForSequenceClassification", "AutoModelForSequenceClassification"),
        ("BertForSequenceClassification", "AutoModelForSequenceClassification"),
        ("BertModel", "AutoModel"),
        ("Qwen3Model", "AutoModel"),
        ("Qwen3ForCausalLM", "AutoModelForCausalLM"),
        ("SomethingOfItsOwn", "AutoModelForCausalLM"),
    ],
)
def test_a_checkpoint_s_class_goes_by_its_architecture(name, expected):
    assert auto_class_of([name]).__name__ == expected


def test_a_checkpoint_that_names_no_architecture_is_a_language_model():
    assert auto_class_of(None).__name__ == "AutoModelForCausalLM"


def test_a_pooler_is_kept_for_a_score_and_unused_by_embeddings():
    assert task_kind("bert.pooler.dense", ("classifier",), TASKS["seq_cls"]) == "pooler"
    assert task_kind("pooler.dense", (), TASKS["embedding"]) == "unused"
    assert task_kind("model.pooler.dense", (), TASKS["sft"]) is None

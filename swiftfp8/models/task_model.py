"""What other tasks than language modelling make of a model: its class, and the head on top of it.

A head is whatever a class has beside the base model: `score` on Llama, `classifier` on BERT, two
linears on RoBERTa. It is new, so it is trained whole and in high precision, under LoRA too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swiftfp8.tasks import Head, Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def auto_class(task: Task) -> Any:
    """transformers' auto class that loads the task's model."""
    import transformers

    return getattr(transformers, task.model_class)


def auto_class_of(architectures: list[str] | None) -> Any:
    """The auto class of a checkpoint, by the class that its config.json names."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    name = (architectures or [""])[0]
    if name in known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values():
        return transformers.AutoModelForSequenceClassification
    bases: set[str] = set()
    for base in known.MODEL_MAPPING_NAMES.values():
        bases |= set(base) if isinstance(base, tuple | list) else {base}
    if name in bases - set(known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return transformers.AutoModel
    return transformers.AutoModelForCausalLM


def set_head(hf_config: PretrainedConfig, head: Head, pad_token_id: int | None = None) -> None:
    """Tell a model's configuration what it is to put out, and which token is padding."""
    hf_config.num_labels = head.num_labels
    hf_config.id2label = dict(enumerate(head.labels))
    hf_config.label2id = {name: k for k, name in enumerate(head.labels)}
    hf_config.problem_type = head.problem_type
    if pad_token_id is not None:
        hf_config.pad_token_id = pad_token_id
        hf_config.get_text_config().pad_token_id = pad_token_id


def head_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules with parameters that stand beside the base model."""
    return tuple(
        name
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    )


def task_kind(name: str, new: tuple[str, ...], task: Task) -> str | None:
    """The kind of a linear that only this task has, None for those that all have."""
    parts = name.split(".")
    if task.adapter_type == "CAUSAL_LM":
        return None
    if parts[0] in new:
        return "score"
    if "pooler" in parts:
        return "unused" if task.model_class == "AutoModel" else "pooler"
    return None


def may_be_missing(name: str, new: tuple[str, ...], task: str) -> bool:
    """Whether a weight may start at random: the new head's, or one that nothing reads."""
    parts = name.split(".")
    return parts[0] in new or (task == "embedding" and "pooler" in parts)


def is_encoder(hf_config: PretrainedConfig) -> bool:
    """Whether tokens see those after them: the class fills in masked words."""
    from transformers import AutoModelForMaskedLM

    decoder = getattr(hf_config, "is_decoder", False)
    return type(hf_config) in AutoModelForMaskedLM._model_mapping and not decoder


def usable_positions(model: PreTrainedModel, positions: int) -> int:
    """Positions that a row can have: tables that number them from the padding's on lose some."""
    from torch import nn

    words = model.get_input_embeddings()
    for module in model.modules():
        if (
            isinstance(module, nn.Embedding)
            and module is not words
            and module.num_embeddings == positions
            and module.padding_idx is not None
        ):
            return positions - module.padding_idx - 1
    return positions

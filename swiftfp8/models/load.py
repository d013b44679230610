"""Read a model's shapes without its weights, and load its weights without surprises.

What transformers only warns of (weights that a checkpoint lacks and that would start at random) is
an error here: nobody wants to find out after a day of training.
"""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.checkpoint import check_checkpoint, read_config_json
from swiftfp8.models.layer_form import why_layers_unfused
from swiftfp8.models.loss_form import why_unfused
from swiftfp8.models.meta import LinearMeta, ModelMeta
from swiftfp8.models.quiet import quiet_transformers
from swiftfp8.models.source import ModelSource
from swiftfp8.models.task_model import (
    auto_class,
    head_modules,
    is_encoder,
    may_be_missing,
    set_head,
    task_kind,
    usable_positions,
)
from swiftfp8.models.tokenizer import load_tokenizer, require_chat_template
from swiftfp8.tasks import TASKS, Head, Task

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["load_meta", "load_model", "load_tokenizer", "read_hf_config", "require_chat_template"]

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)(?:\.|$)")
_ROUTERS = ("gate", "router", "shared_expert_gate")  # last name parts of plain linears that route
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def load_meta(source: ModelSource, config: Config, head: Head | None = None) -> ModelMeta:
    """Shapes, counts and linears of the model, built on the meta device: no weights are read.

    Seconds at any size. `head` is what `task=seq_cls` and `reward` put on it. Raises SwiftFP8Error
    where the files are faulty, or where the architecture isn't one that the task can train.
    """
    task = TASKS[config.task]
    check_checkpoint(source.path)
    hf_config = read_hf_config(source.path, config.trust_remote_code)
    if head is not None:
        set_head(hf_config, head)
    model = _build_meta(hf_config, source.path, config.trust_remote_code, task)
    text = hf_config.get_text_config()
    new = head_modules(model) if head is not None else ()
    linears = (*_linears(model, new, task), *_experts(model, text))
    if not any(linear.kind == "linear" for linear in linears):
        log.warning(
            "%s has no nn.Linear outside its head: nothing to run in FP8", type(model).__name__
        )
    heads = int(text.num_attention_heads)
    hidden = int(text.hidden_size)
    positions = usable_positions(model, int(_first(text, "max_position_embeddings") or 0))
    intermediate = _first(text, "intermediate_size", "ffn_dim", "n_inner") or 4 * hidden
    return ModelMeta(
        name=source.name,
        family=source.family.name,
        path=source.path,
        architecture=type(model).__name__,
        hidden_size=hidden,
        intermediate_size=int(intermediate),
        num_layers=int(text.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(_first(text, "num_key_value_heads") or heads),
        head_dim=int(_first(text, "head_dim") or hidden // heads),
        vocab_size=int(text.vocab_size),
        max_position_embeddings=positions,
        learned_positions=_has_position_table(model, positions),
        tied_head=_is_tied(model),
        linears=linears,
        total_params=sum(parameter.numel() for parameter in model.parameters()),
        keep_high=dict(source.family.keep_high),
        unfused_loss=why_unfused(model),
        unfused_layers=why_layers_unfused(model),
        qk_norm=any(name.endswith(".q_norm") for name, _ in model.named_modules()),
        head=head,
        head_modules=new,
        encoder=is_encoder(hf_config),
    )


def load_model(
    source: ModelSource,
    dtype: str,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    device: str = "cpu",
    *,
    task: str = "sft",
    head: Head | None = None,
    pad_token_id: int | None = None,
) -> PreTrainedModel:
    """The model with its weights in `dtype` ("bf16", "fp16", "fp32") on `device`.

    Shards are read tensor by tensor, so the peak is the model's own size. The key/value cache is
    off, as training wants it. A `head` that the checkpoint lacks is drawn from torch's random
    state; `pad_token_id` tells it where a row ends. Raises SwiftFP8Error where any other weight is
    missing or of another shape.
    """
    import torch

    check_checkpoint(source.path)
    hf_config = read_hf_config(source.path, trust_remote_code)
    if head is not None:
        set_head(hf_config, head, pad_token_id)
    with quiet_transformers():
        try:
            model, info = auto_class(TASKS[task]).from_pretrained(
                source.path,
                config=hf_config,
                dtype=getattr(torch, _DTYPES[dtype]),
                device_map=None if device == "cpu" else {"": device},
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
        except ImportError as error:
            flash = attn_implementation == "flash_attention_2"
            raise SwiftFP8Error(
                f"a package that the model needs is missing: {_first_line(error)}",
                where="attn_implementation=flash_attention_2" if flash else str(source.path),
                fix=f"install it{', or set attn_implementation=sdpa' * flash}",
            ) from error
        except (OSError, ValueError, KeyError) as error:
            raise SwiftFP8Error(
                f"the model can't be loaded: {_first_line(error)}", where=str(source.path)
            ) from error
    fresh = head_modules(model) if head is not None else ()
    missing = [name for name in info["missing_keys"] if not may_be_missing(name, fresh, task)]
    speaks = TASKS[task].adapter_type == "CAUSAL_LM"
    check_loaded({**info, "missing_keys": missing}, source.path, fresh, whole=speaks)
    hf_config = model.config
    hf_config.use_cache = False
    hf_config.get_text_config().use_cache = False
    return model


def require_attention(attn_implementation: str) -> None:
    """Find out before anything is loaded that an implementation of attention can't be had.

    Raises:
        SwiftFP8Error: it needs a package that is not installed.
    """
    packages = ("flash_attn", "kernels")  # transformers takes a kernel of the hub by the latter
    if attn_implementation == "flash_attention_2" and not any(map(find_spec, packages)):
        raise SwiftFP8Error(
            "flash attention 2 is not installed",
            where="attn_implementation=flash_attention_2",
            fix="pip install flash-attn, or set attn_implementation=sdpa",
        )


def read_hf_config(path: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration object of the model directory `path`, of a causal language model."""
    raw = read_config_json(path)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    mistakes = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)

    where = str(path / "config.json")
    remote = "AutoConfig" in (raw.get("auto_map") or {})
    if raw["model_type"] not in CONFIG_MAPPING and not remote:
        raise SwiftFP8Error(
            f"unknown architecture: transformers doesn't know model_type '{raw['model_type']}'",
            where=where,
            fix="check model_type in config.json, or pip install --upgrade transformers",
        )
    if raw["model_type"] not in CONFIG_MAPPING and not trust_remote_code:
        raise _needs_remote_code(path)
    try:
        return AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except mistakes as error:
        raise SwiftFP8Error(
            f"config.json doesn't describe a model: {_first_line(error)}", where=where
        ) from error
    except ImportError as error:
        raise SwiftFP8Error(
            f"the checkpoint's own code can't be imported: {_first_line(error)}", where=where
        ) from error


def _build_meta(
    hf_config: PretrainedConfig, path: Path, trust_remote_code: bool, task: Task
) -> PreTrainedModel:
    """The model's modules on the meta device, nothing initialised, tied weights tied."""
    import torch
    from transformers.initialization import no_init_weights

    model_class = auto_class(task)
    remote = task.model_class in (getattr(hf_config, "auto_map", None) or {})
    if type(hf_config) not in model_class._model_mapping:
        if not remote:
            raise SwiftFP8Error(
                f"model_type '{hf_config.model_type}' is not {task.what}",
                where=str(path / "config.json"),
                fix=f"task={task.name} trains models that transformers loads with "
                f"{task.model_class}",
            )
        if not trust_remote_code:
            raise _needs_remote_code(path)
    try:
        with quiet_transformers(), torch.device("meta"), no_init_weights():
            model = model_class.from_config(
                hf_config, trust_remote_code=trust_remote_code, attn_implementation="eager"
            )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,  # no heads to divide by
        RuntimeError,
        ImportError,
    ) as error:
        raise SwiftFP8Error(
            f"no model can be built from config.json: {_first_line(error)}",
            where=str(path / "config.json"),
        ) from error
    model.tie_weights()
    return model


def _linears(model: PreTrainedModel, new: tuple[str, ...], task: Task) -> tuple[LinearMeta, ...]:
    """Every linear in module order. Subclasses of nn.Linear are routers of some MoE models.

    `new` are the modules of the task's own head.
    """
    from torch import nn

    head = model.get_output_embeddings()
    return tuple(
        LinearMeta(
            name=name,
            in_features=module.in_features,
            out_features=module.out_features,
            bias=module.bias is not None,
            kind=task_kind(name, new, task) or _kind(name, module, head),
            layer=int(found[1]) if (found := _LAYER.search(name)) else None,
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    )


def _experts(model: PreTrainedModel, text: Any) -> tuple[LinearMeta, ...]:
    """Experts, held as one 3-D parameter [experts, out, in] for each projection of a layer."""
    active = _first(text, "num_experts_per_tok", "moe_topk", "top_k")
    return tuple(
        LinearMeta(
            name=name,
            in_features=parameter.shape[2],
            out_features=parameter.shape[1],
            bias=False,
            kind="experts",
            layer=int(found[1]) if (found := _LAYER.search(name)) else None,
            count=min(int(active or parameter.shape[0]), parameter.shape[0]),
        )
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and "expert" in name
    )


def _kind(name: str, module: nn.Linear, head: nn.Module | None) -> str:
    from torch import nn

    if module is head:
        return "head"
    if type(module) is not nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return "router"
    return "linear"


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the output projection is the embedding matrix itself."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)


def _has_position_table(model: PreTrainedModel, positions: int) -> bool:
    """Whether an embedding has a row for each position. (OPT's has two more, for padding.)"""
    from torch import nn

    words = model.get_input_embeddings()
    return positions > 0 and any(
        positions <= module.num_embeddings <= positions + 2
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not words
    )


def check_loaded(
    info: dict[str, Any], path: Path, fresh: tuple[str, ...] = (), *, whole: bool = True
) -> None:
    """Raise for weights that were missing or of another shape; warn of those that had no place.

    Modules that are `fresh` may be of another shape. The language model's head has no
    place in one that is not `whole`, which is nothing to warn of.
    """
    missing = sorted(info["missing_keys"])
    if missing and all("pooler" in name.split(".") for name in missing):
        raise SwiftFP8Error(
            "the checkpoint has no pooler, and the score would be read from a random one",
            where=str(path),
            fix="take a checkpoint with a pooler (bert-base-uncased has one), or an architecture "
            "that needs none, such as RoBERTa or ModernBERT",
        )
    if missing:
        raise SwiftFP8Error(
            f"the checkpoint lacks {len(missing)} weights of the model: {_listed(missing)}",
            where=str(path),
            fix="the files and config.json don't belong together, or a file is incomplete; "
            "download the checkpoint again",
        )
    mismatched = sorted(
        f"{name} {tuple(found)} instead of {tuple(expected)}"
        for name, found, expected in info["mismatched_keys"]
        if name.split(".")[0] not in fresh
    )
    if mismatched:
        raise SwiftFP8Error(
            f"weights of another shape than config.json says: {_listed(mismatched)}",
            where=str(path),
            fix="config.json belongs to another model",
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected and whole:
        count = len(unexpected)
        log.warning("%d weights have no place in the model: %s", count, _listed(unexpected))


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def _needs_remote_code(path: Path) -> SwiftFP8Error:
    return SwiftFP8Error(
        "the model comes with code of its own, which only runs if you say so",
        where=str(path),
        fix="read that code, then set trust_remote_code=true",
    )


def _first(config: Any, *names: str) -> Any:
    """The first of these attributes that the configuration has and that isn't empty."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return value
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

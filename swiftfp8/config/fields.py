"""The schema as a flat table of dotted keys: for help texts, suggestions and shell completion."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from swiftfp8.config.kinds import FREE_TEXT
from swiftfp8.config.schema import Config
from swiftfp8.errors import SwiftFP8Error

# What other trainers call it, or what people type, and the key that means it here.
SYNONYMS = {
    "adapter": "tuner",
    "batch_size": "per_device_train_batch_size",
    "bf16": "dtype",
    "cutoff_len": "max_length",
    "datasets": "dataset",
    "epochs": "num_train_epochs",
    "eval_dataset": "val_dataset",
    "finetuning_type": "tuner",
    "fp16": "dtype",
    "fp8": "dtype",
    "gradient_clipping": "max_grad_norm",
    "grad_accum": "gradient_accumulation_steps",
    "lora_r": "lora_rank",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "lr": "learning_rate",
    "max_seq_length": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "model_id_or_path": "model",
    "model_name_or_path": "model",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim.name",
    "pretrained_model": "model",
    "quantization_bit": "export_quantization_bit",
    "rank": "lora_rank",
    "scheduler": "optim.lr_scheduler_type",
    "sequence_len": "max_length",
    "stage": "task",
    "torch_dtype": "dtype",
    "train_type": "tuner",
    "val_size": "split_dataset_ratio",
}


@dataclass(frozen=True, kw_only=True)
class FieldDoc:
    """One key of the configuration. `kind` says how a command-line value of it is read."""

    key: str
    kind: Literal["text", "free_text", "names", "mapping", "choice", "flag", "number"]
    type_text: str
    choices: tuple[str, ...]
    nullable: bool
    default: Any
    help: str


@cache
def field_docs() -> dict[str, FieldDoc]:
    """Every leaf key, dotted, in the schema's order."""
    return {doc.key: doc for doc in _walk(Config, "")}


@cache
def schema_groups() -> tuple[str, ...]:
    """The root keys that hold other keys."""
    return tuple(dict.fromkeys(key.split(".")[0] for key in field_docs() if "." in key))


def mapping_parent(key: str) -> FieldDoc | None:
    """The mapping field (such as `data.columns`) that `key` is an entry of."""
    parent, _, _ = key.rpartition(".")
    doc = field_docs().get(parent)
    return doc if doc and doc.kind == "mapping" else None


def unknown_key(
    key: str, *, where: str | None, also: tuple[str, ...] = (), group: str | None = None
) -> SwiftFP8Error:
    """The error for a key that does not exist; `also` are keys known to the command alone.

    A leaf of `group`, which the command is about, is meant before that of any other.
    """
    within = f"{group}.{key}"
    best = within if within in field_docs() else _closest_key(key, also)
    fix = f"did you mean {best}?" if best else "list the keys: swiftfp8 config show"
    return SwiftFP8Error(f"unknown key '{key}'", where=where, fix=fix)


def _closest_key(key: str, also: tuple[str, ...]) -> str | None:
    known = (*field_docs(), *also) if "." in key else (*field_docs(), *schema_groups(), *also)
    leaf = key.rpartition(".")[2]
    for candidate in (key, leaf):
        if candidate in SYNONYMS:
            return SYNONYMS[candidate]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return same_leaf[0]
    group = key.rpartition(".")[0]
    siblings = [name for name in known if group and name.rpartition(".")[0] == group]
    leaves = {name.rpartition(".")[2].lower(): name for name in reversed(siblings or known)}
    close = difflib.get_close_matches(leaf.lower(), leaves, n=1, cutoff=0.6)
    if close:
        return leaves[close[0]]
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(key.lower(), lowered, n=1, cutoff=0.8)
    return lowered[close[0]] if close else None


def _walk(cls: Any, prefix: str) -> Iterator[FieldDoc]:
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    for name, info in fields.items():
        if dataclasses.is_dataclass(info.annotation):
            yield from _walk(info.annotation, f"{prefix}{name}.")
        else:
            yield _describe(f"{prefix}{name}", info)


def _describe(key: str, info: FieldInfo) -> FieldDoc:
    inner, metadata, nullable = _unwrap(info.annotation, list(info.metadata))
    kind, text, choices = _kind(inner, metadata)
    return FieldDoc(
        key=key,
        kind=kind,
        type_text=text + (", or null" if nullable else ""),
        choices=choices,
        nullable=nullable,
        default=info.get_default(call_default_factory=True, validated_data={}),
        help=(info.description or "").strip(),
    )


def _unwrap(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any], bool]:
    """Take `| None` and `Annotated` off; return what is left, its metadata, and if null is ok."""
    nullable = False
    if get_origin(annotation) in (Union, types.UnionType):
        nullable = type(None) in get_args(annotation)
        (annotation,) = (arg for arg in get_args(annotation) if arg is not type(None))
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [*metadata, *more]
    return annotation, metadata, nullable


def _kind(inner: Any, metadata: list[Any]) -> tuple[Any, str, tuple[str, ...]]:
    if get_origin(inner) is Literal:
        choices = tuple(str(arg) for arg in get_args(inner))
        return "choice", "one of " + ", ".join(choices), choices
    if get_origin(inner) is list:
        item, _, _ = _unwrap(get_args(inner)[0], [])
        kinds: dict[Any, str] = {str: "texts", int: "whole numbers", float: "numbers"}
        return "names", f"list of {kinds[item]}", ()
    if get_origin(inner) is dict:
        value = get_args(inner)[1]
        return "mapping", f"mapping of text to {'text' if value is str else 'number'}", ()
    if inner is bool:
        return "flag", "true or false", ("true", "false")
    if inner is str:
        return ("free_text" if FREE_TEXT in metadata else "text"), "text", ()
    assert inner in (int, float), inner
    name = "whole number" if inner is int else "number"
    return "number", " ".join([name, *_bounds(metadata)]), ()


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(list(item.metadata))
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if (limit := getattr(item, attribute, None)) is not None:
                yield f"{sign} {limit:g}"

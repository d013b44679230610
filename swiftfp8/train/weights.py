"""A checkpoint's model files: a plain PEFT adapter or a plain Hugging Face model, and its identity.

Nothing of a precision backend's own state is written, so a checkpoint loads wherever the plain
model does, and a run may resume on another kind of hardware. The fingerprint keeps a checkpoint
from being resumed by a job that it does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from swiftfp8.adapters.pissa import save_change, without_principal
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.freezing import is_below
from swiftfp8.models.checkpoint import read_config_json
from swiftfp8.models.identity import digest_model
from swiftfp8.plan import LoraPlan, Plan
from swiftfp8.tasks import TASK_FILE, TASKS
from swiftfp8.train.checkpoint import read_manifest
from swiftfp8.tuning import ADAMW

StateDict = dict[str, torch.Tensor]
_PEFT_PREFIX = "base_model.model."
_ADAPTER_FILE = "adapter_model.safetensors"


def save_weights(
    model: Any,
    tokenizer: Any,
    folder: Path,
    plain_state_dict: Callable[[Any], StateDict],
    plan: Plan,
) -> None:
    """Write what was trained and the tokenizer's files into `folder`.

    That is the adapter (LoRA), the trained modules in an adapter's form (freeze), which PEFT puts
    in place of the base's, or the model (full).
    """
    if is_peft(model):
        if plan.lora is not None and plan.lora.init == "pissa":
            save_change(model, folder)
        else:
            # The base's embeddings are never trained here; PEFT might ask the hub to find out.
            model.save_pretrained(str(folder), save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    elif plan.trained:
        _save_trained(model, folder, plain_state_dict(model), plan)
    else:
        with _no_progress_bar(), _cache_as_in_base(model.config):
            model.save_pretrained(str(folder), state_dict=plain_state_dict(model))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def write_task_file(folder: Path, plan: Plan, pad_token_id: int | None = None) -> None:
    """Say what the checkpoint is for: an adapter's base does not know its labels."""
    if TASKS[plan.task].adapter_type == "CAUSAL_LM":
        return
    said = {
        "task": plan.task,
        "head": None if plan.head is None else asdict(plan.head),
        "pooling": plan.pooling,
        "pad_token_id": pad_token_id,
    }
    text = json.dumps(said, indent=2, ensure_ascii=False)
    (folder / TASK_FILE).write_text(text + "\n", encoding="utf-8")


def load_weights(
    model: Any,
    checkpoint: Path,
    plain_state_dict: Callable[[Any], StateDict],
    load_plain_state_dict: Callable[[Any, StateDict], Any],
    plan: Plan,
) -> None:
    """Load what `save_weights` wrote into the injected model, in place."""
    if is_peft(model):
        _load_adapter(
            model, checkpoint, doubled=plan.lora is not None and plan.lora.init == "pissa"
        )
        return
    if plan.trained:
        _load_trained(plain_state_dict(model), checkpoint, plan)
        return
    tensors: StateDict = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        tensors.update(load_file(shard))
    load_plain_state_dict(model, tensors)


def is_peft(model: Any) -> bool:
    """Whether `model` is wrapped by PEFT."""
    from peft import PeftModel

    return isinstance(model, PeftModel)


def fingerprint(plan: Plan, model: Any, optimizer: str = "adamw_torch") -> dict[str, Any]:
    """What must be equal for a checkpoint to be resumed: the base model and what is trained how."""
    config = model.config.get_text_config() if hasattr(model, "config") else None
    lora = plan.lora
    base = getattr(getattr(model, "config", None), "name_or_path", "")
    language = TASKS[plan.task].packs
    return {
        "task": None if language else plan.task,
        "labels": list(plan.head.labels) if plan.head else None,
        "model": plan.model_name,
        "base": digest_model(Path(base)) if base else None,
        "hidden_size": getattr(config, "hidden_size", None),
        "layers": getattr(config, "num_hidden_layers", None),
        "vocab_size": getattr(config, "vocab_size", None),
        "tuner": plan.tuner,
        "lora_rank": lora.rank if lora else None,
        "lora_alpha": lora.alpha if lora else None,
        "use_rslora": lora.use_rslora if lora else None,
        "target_modules": sorted(lora.targets) if lora else None,
        # None as they are usually, so that checkpoints of old fit.
        "rank_pattern": dict(lora.rank_pattern) or None if lora else None,
        "alpha_pattern": dict(lora.alpha_pattern) or None if lora else None,
        "modules_to_save": _saved(lora),
        "trained": list(plan.trained) or None,
        "use_dora": True if lora and lora.use_dora else None,
        "init_lora": "pissa" if lora and lora.init == "pissa" else None,
        "lora_plus": True if lora and lora.plus_ratio != 1.0 else None,
        "optimizer": optimizer if optimizer not in ADAMW else None,
    }


def _saved(lora: LoraPlan | None) -> list[str] | None:
    """What is trained whole beside LoRA."""
    return sorted(lora.modules_to_save) or None if lora else None


def check_fingerprint(checkpoint: Path, now: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another base model, tuner or adapter shape.

    Checkpoints of old say nothing of the base's files: those fit by name and shape.

    Raises:
        SwiftFP8Error: naming every value that differs, then and now.
    """
    then = read_manifest(checkpoint).get("fingerprint", {})
    different = []
    for key, value in now.items():
        old = then.get(key)
        if key == "base":
            different += _changed_files(old, value)
        elif old != value:
            different.append(f"{key} is {_shown(value, old)}, was {_shown(old, value)}")
    if different:
        raise SwiftFP8Error(
            "the checkpoint belongs to another job; " + "; ".join(different),
            where=f"resume_from_checkpoint={checkpoint}",
            fix="resume with the options that the run began with (resolved.yaml beside the "
            "checkpoint), or start a new run without resume_from_checkpoint",
        )


def _changed_files(then: Mapping[str, str] | None, now: Mapping[str, str] | None) -> list[str]:
    """That the base model is another one, with the files that show it; nothing where unknown."""
    if not then or not now or then == now:
        return []
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return [f"the base model is another one: {', '.join(names[:2])}{more} changed"]


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers' bars out of ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _cache_as_in_base(config: Any) -> Iterator[None]:
    """Save the base's own `use_cache`: training turns it off, and who generates wants it on."""
    raw = read_config_json(Path(config.name_or_path)) if config.name_or_path else {}
    text = config.get_text_config()
    trained = config.use_cache, text.use_cache
    config.use_cache = raw.get("use_cache", True)
    text.use_cache = raw.get("text_config", raw).get("use_cache", True)
    try:
        yield
    finally:
        config.use_cache, text.use_cache = trained


def _save_trained(model: Any, folder: Path, tensors: StateDict, plan: Plan) -> None:
    """The trained modules as an adapter that has no LoRA, but modules to save."""
    from peft import LoraConfig
    from peft.utils.constants import DUMMY_TARGET_MODULES

    trained = {name: t for name, t in tensors.items() if is_below(name, plan.trained)}
    adapter = LoraConfig(
        r=1,
        target_modules=DUMMY_TARGET_MODULES,
        modules_to_save=sorted({name.rpartition(".")[0] for name in trained}),
        task_type=TASKS[plan.task].adapter_type,
        base_model_name_or_path=model.config.name_or_path,
        inference_mode=True,
    )
    adapter.save_pretrained(str(folder))
    save_file(
        {f"{_PEFT_PREFIX}{name}": t.contiguous() for name, t in trained.items()},
        folder / _ADAPTER_FILE,
        metadata={"format": "pt"},
    )


def _load_trained(own: StateDict, checkpoint: Path, plan: Plan) -> None:
    """Copy saved modules into the tensors `own`; the fingerprint says that they fit."""
    saved = {
        k.removeprefix(_PEFT_PREFIX): t for k, t in load_file(checkpoint / _ADAPTER_FILE).items()
    }
    trained = {name for name in own if is_below(name, plan.trained)}
    if odd := sorted(trained ^ set(saved)):
        raise SwiftFP8Error(
            f"the checkpoint does not fit the model: {odd[0]} is in one of them only",
            where=str(checkpoint / _ADAPTER_FILE),
            fix="resume with the options that the run began with",
        )
    with torch.no_grad():
        for name in trained:
            own[name].copy_(saved[name])


def _load_adapter(model: Any, checkpoint: Path, *, doubled: bool) -> None:
    from peft import set_peft_model_state_dict

    tensors = load_file(checkpoint / _ADAPTER_FILE)
    if doubled:
        tensors = without_principal(tensors)
    result = set_peft_model_state_dict(model, tensors)
    missing = [key for key in result.missing_keys if "lora_" in key or ".modules_to_save." in key]
    if missing or result.unexpected_keys:
        raise SwiftFP8Error(
            f"the adapter does not fit the model: {len(missing)} tensors missing, "
            f"{len(result.unexpected_keys)} too many, such as "
            f"{(missing + list(result.unexpected_keys))[0]}",
            where=str(checkpoint / _ADAPTER_FILE),
            fix="resume with the options that the run began with",
        )


def _shown(value: Any, other: Any) -> str:
    """A value for people; of two long lists only what is in this one alone."""
    if not isinstance(value, list):
        return str(value)
    extra = [name for name in value if name not in set(other or ())]
    if not extra:
        return f"{len(value)} modules"
    more = f" and {len(extra) - 2} more" if len(extra) > 2 else ""
    return f"{len(value)} modules, with {', '.join(extra[:2])}{more}"

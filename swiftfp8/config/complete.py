"""Shell completion of `key=value` tokens: keys, then what a key can be.

Runs at every press of Tab, so it reads the schema and file names and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from swiftfp8.config.fields import field_docs
from swiftfp8.config.paths import (
    GROUPS,
    configs_dir,
    group_options,
    model_types,
    recipes_dir,
    yaml_names,
)

_HARDWARE = ("cpu", "t4", "v100", "a100", "rtx4090", "h100", "h200", "b200")
_RUN_KEYS = {
    "run": "A run directory.",
    "adapter": "A directory with a PEFT adapter.",
    "checkpoint": "best, last or checkpoint-N of the run.",
}
_BENCH_KEYS = {
    "stacks": "What to compare: plan, bf16, hf, compiled.",
    "steps": "Timed steps.",
    "warmup": "Steps before them.",
    "out": "Where the results are written, as JSON.",
}
_CHAT_KEYS = ("prompt", "system", "enable_thinking")
_INFER_KEYS = {
    **_RUN_KEYS,
    "model": "A model directory, hub id or registered name.",
    "hub": "Where a hub id is looked up: hf or modelscope.",
    "prompt": "One question; left out, the chat is interactive.",
    "system": "System prompt.",
    "max_new_tokens": "Longest reply.",
    "temperature": "0 takes the likeliest token.",
    "top_p": "Share of the likeliest tokens to draw from.",
    "seed": "Seed of the draw.",
    "enable_thinking": "Reasoning on or off, for templates that know it; null is their default.",
    "trust_remote_code": "Run model code that comes with the checkpoint.",
}
_EVAL_KEYS = {
    **{key: text for key, text in _INFER_KEYS.items() if key not in _CHAT_KEYS},
    "dataset": "Rows to ask, in place of the run's evaluation rows.",
    "limit": "How many rows are asked; 0 asks all.",
    "batch_size": "Answers generated at a time.",
    "out": "Where all answers are written, as JSON.",
}


_DEPLOY_KEYS = {
    "dir": "An export's directory.",
    "engine": "Who serves it.",
    "python": "Python of an environment that has the engine.",
    "host": "Address to listen on.",
    "port": "Port to listen on.",
}


def complete_token(command: str, before: Sequence[str], incomplete: str) -> list[tuple[str, str]]:
    """Candidates and their help for the word being typed.

    bash cuts words at `=`: there `key=val` arrives as `key`, `=`, `val`, and wants candidates for
    `val` alone. Other shells pass the whole token and want whole tokens back.
    """
    if before and before[-1] in dict(command_keys(command)):  # the `=` itself is the word at hand
        return _values(command, before[-1], incomplete.removeprefix("="))
    if len(before) >= 2 and before[-1] == "=":
        return _values(command, before[-2], incomplete)
    key, equals, start = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", text) for value, text in _values(command, key, start)]
    keys = [(name, text) for name, text in command_keys(command) if name.startswith(key)]
    if len(keys) == 1 and (values := _values(command, keys[0][0], "")):
        return [(f"{keys[0][0]}={value}", text) for value, text in values]
    return [(f"{name}=", text) for name, text in keys]


def command_keys(command: str) -> Iterable[tuple[str, str]]:
    """The keys that a command takes, with their help."""
    if command == "deploy":
        return _DEPLOY_KEYS.items()
    if command == "infer":
        return _INFER_KEYS.items()
    if command == "eval":
        return _EVAL_KEYS.items()
    keys = {key: doc.help for key, doc in field_docs().items()}
    if command in ("export", "merge"):
        wanted = ("export.", "export_", "trust_remote_code")
        own = {key: text for key, text in keys.items() if key.startswith(wanted)}
        return {**_RUN_KEYS, "model": "A model directory.", **own, "export": "Group."}.items()
    groups = {group: "Option group." for group in GROUPS if group not in keys}
    first = {"config": "A recipe, or the path of one."}
    if command == "bench":
        first |= _BENCH_KEYS
    if command == "plan":
        first["hardware"] = "Plan for other hardware: a name, or <name>:<sm>:<GiB>."
    return {**first, **keys, **groups}.items()


def _values(command: str, key: str, start: str) -> list[tuple[str, str]]:
    found = [(value, "") for value in _choices(command, key) if value.startswith(start)]
    return found or _paths(command, key, start)


def _choices(command: str, key: str) -> Sequence[str]:
    doc = field_docs().get(key)
    if key == "config":
        return [*yaml_names(recipes_dir()), *(f"{name}.yaml" for name in yaml_names(Path.cwd()))]
    if key == "hardware" and command == "plan":
        return _HARDWARE
    if key == "enable_thinking" and command == "infer":
        return ("true", "false", "null")
    if key == "engine" and command == "deploy":
        return field_docs()["export.target"].choices
    if key == "checkpoint":
        return ("best", "last")
    if key == "model_type":
        return model_types()
    if key in ("dataset", "val_dataset", "export.fidelity_dataset"):
        return yaml_names(configs_dir() / "dataset")
    if key in GROUPS:
        return group_options(key)
    choices = doc.choices if doc else ()
    return (*choices, "null") if doc and doc.nullable and choices else choices


def _paths(command: str, key: str, start: str) -> list[tuple[str, str]]:
    """Files and folders, for keys that hold paths."""
    doc = field_docs().get(key)
    if not (
        key in ("config", "dir", "python", *_RUN_KEYS) or (doc and doc.kind in ("text", "names"))
    ):
        return []
    folder, _, name = start.rpartition("/")
    parent = Path(folder or ("/" if start.startswith("/") else ".")).expanduser()
    if not parent.is_dir():
        return []
    prefix = f"{folder}/" if "/" in start else ""
    return [
        (f"{prefix}{item.name}{'/' if item.is_dir() else ''}", "")
        for item in sorted(parent.iterdir())
        if item.name.startswith(name) and not (item.name.startswith(".") and not name)
    ]

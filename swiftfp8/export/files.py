"""The files beside the weights: configuration, tokenizer, chat template, licence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MODELOPT_CONFIG = "hf_quant_config.json"
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates/*",
)
_TOKENIZER_PROOF = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")
_OTHER = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "*.py",
)


def copy_companions(
    model_dir: Path, adapter_dir: Path | None, target: Path, *, model: bool = True
) -> list[str]:
    """Copy what an engine needs beside the weights; returns the names copied.

    Beside an adapter (not `model`) that is the tokenizer alone.

    The tokenizer files come all from one place: the run's checkpoint where it has a tokenizer
    (training may have changed the template), else the model's directory.
    """
    wanted = [*_matching(tokenizer_home(model_dir, adapter_dir), _TOKENIZER)]
    wanted += _matching(model_dir, _OTHER) if model else []
    copied = []
    for root, file in wanted:
        relative = file.relative_to(root)
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / relative)
        copied.append(str(relative))
    return copied


def tokenizer_home(model_dir: Path, adapter_dir: Path | None) -> Path:
    """The directory that an export takes its tokenizer from."""
    run_has_one = adapter_dir is not None and has_tokenizer(adapter_dir)
    return adapter_dir if run_has_one and adapter_dir else model_dir


def has_tokenizer(directory: Path) -> bool:
    """True where the directory holds a tokenizer's vocabulary."""
    return any(True for _ in _matching(directory, _TOKENIZER_PROOF))


def write_config(base: Mapping[str, Any], patch: Mapping[str, Any], target: Path) -> None:
    """Write config.json: the base's, with the dtype and sections that the format wants."""
    config = {**base, **patch}
    for section in (config, *[v for v in config.values() if isinstance(v, dict)]):
        if "torch_dtype" in section:
            section["torch_dtype"] = patch["dtype"]
        if "dtype" in section:
            section["dtype"] = patch["dtype"]
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _matching(root: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    seen: set[Path] = set()
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            if file.is_file() and file not in seen:
                seen.add(file)
                yield root, file

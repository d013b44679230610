"""Take the language model out of a checkpoint that also sees images.

Fine-tuning on text trains the language model only. Its weights are written once to a directory of
their own, under the names of the text architecture, so that training, adapters, export and plain
transformers all see one and the same model.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.cache import cached_model
from swiftfp8.models.checkpoint import check_checkpoint, read_config_json
from swiftfp8.models.quiet import quiet_transformers

log = logging.getLogger(__name__)

# Prefixes of the language model's tensors, old and new spelling, to the text model's own.
_TEXT_NAMES = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
}
_TOKENIZER_FILES = ("token*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab*")
_OTHER_FILES = ("merges.txt", "generation_config.json")


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a language model with a vision tower."""
    return isinstance(config.get("text_config"), dict) and "vision_config" in config


def extract_text_model(path: Path, name: str) -> Path:
    """The directory of the language model inside the multimodal checkpoint `path`."""
    check_checkpoint(path)
    weights = sorted(path.glob("*.safetensors"))
    return cached_model(
        "text",
        f"{name}-text",
        [path / "config.json", *weights],
        lambda folder: _extract(path, folder),
    )


def _extract(path: Path, folder: Path) -> None:
    """Write weights (in the checkpoint's own dtype), configuration and tokenizer to `folder`."""
    log.warning("%s also sees images: only its language model is trained and exported", path.name)
    from transformers import AutoConfig, AutoModelForCausalLM

    text_config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    if type(text_config) not in AutoModelForCausalLM._model_mapping:
        raise SwiftFP8Error(
            f"the language model of a {read_config_json(path)['model_type']} checkpoint can't be "
            "used on its own",
            where=str(path),
            fix="use a text-only checkpoint",
        )
    with quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=text_config,
            dtype="auto",
            key_mapping=_TEXT_NAMES,
            local_files_only=True,
            output_loading_info=True,
        )
        if info["missing_keys"]:
            raise SwiftFP8Error(
                "the language model's weights are not where they should be, "
                f"e.g. {min(info['missing_keys'])}",
                where=str(path),
                fix="use a text-only checkpoint",
            )
        model.save_pretrained(folder, save_original_format=False)  # the new names, not the old
    for pattern in (*_TOKENIZER_FILES, *_OTHER_FILES):
        for file in path.glob(pattern):
            shutil.copyfile(file, folder / file.name)

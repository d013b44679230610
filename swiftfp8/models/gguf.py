"""GGUF files: unpacked once into a BF16 Hugging Face directory, which the rest works with.

transformers reads the tensors, the configuration and the tokenizer out of the file. The result is
kept in the cache, so the conversion costs its minute only once. The weights are those of the file:
a Q4 file gives a BF16 model with Q4's losses.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.cache import cached_model
from swiftfp8.models.quiet import quiet_transformers

log = logging.getLogger(__name__)

_SPACE = "\u2581"  # how sentencepiece vocabularies spell a space
_SPACES = (_SPACE, "\u0120")  # the second: byte-level vocabularies
# Frequent English words: every vocabulary that was learned holds most of them as one token.
_COMMON_WORDS = ("the", "and", "that", "with", "from", "have", "this", "which", "their", "people")


def convert_gguf(file: Path) -> Path:
    """The Hugging Face directory (BF16 safetensors, tokenizer) made from the GGUF file `file`."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise SwiftFP8Error(
                "not a GGUF file (its first bytes aren't 'GGUF')",
                where=str(file),
                fix="copy or download the file again",
            )
    return cached_model("gguf", file.stem, [file], lambda folder: _convert(file, folder))


def _convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of the GGUF file `file` into `folder`."""
    log.info("converting %s to a BF16 model directory, once", file.name)
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    tokenizer = _read(file, lambda: _load_tokenizer(file))
    with quiet_transformers():
        model, info = _read(
            file,
            lambda: AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
                local_files_only=True,
            ),
        )
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"])[:4])
            raise SwiftFP8Error(
                f"the GGUF file lacks weights of its model: {missing}", where=str(file)
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read(file: Path, load: Any) -> Any:
    """Call `load`, with transformers' and gguf's errors turned into one that names the file."""
    try:
        return load()
    except ImportError as error:
        raise SwiftFP8Error(
            f"a package that reads GGUF files is missing: {error}",
            where=str(file),
            fix="pip install gguf accelerate",
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, struct.error) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise SwiftFP8Error(
            f"the GGUF file can't be converted: {reason}",
            where=str(file),
            fix="is the file complete, and its architecture one that transformers reads from GGUF?",
        ) from error


def _load_tokenizer(file: Path) -> Any:
    """The file's tokenizer, rebuilt by hand where transformers builds a wrong one.

    transformers before 5.18 gives Gemma's byte-pair vocabulary to a unigram model, and splits
    ordinary words into letters.
    """
    from transformers import AutoTokenizer

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
    if _splits_common_words(tokenizer) and type(tokenizer).__name__.startswith("Gemma"):
        tokenizer = _rebuild_from_vocabulary(tokenizer)
    if _splits_common_words(tokenizer):
        raise ValueError("its tokenizer comes out wrong in this version of transformers")
    return tokenizer


def _splits_common_words(tokenizer: Any) -> bool:
    """Whether words that are one token of the vocabulary are cut into several."""
    vocabulary = tokenizer.get_vocab()
    ids = {
        word: vocabulary[space + word]
        for word in _COMMON_WORDS
        for space in _SPACES
        if space + word in vocabulary
    }
    cut = [
        word
        for word, token in ids.items()
        if token not in tokenizer.encode(f"a {word}", add_special_tokens=False)
    ]
    return len(cut) > len(ids) / 2


def _rebuild_from_vocabulary(tokenizer: Any) -> Any:
    """A tokenizer of the same class whose byte-pair merges follow the vocabulary's order.

    In Gemma's vocabulary a token's position is the rank of the merge that makes it, so each way to
    cut a token into two others is a merge of that rank.
    """
    vocabulary = {
        (_SPACE * len(token) if token and not token.strip(" ") else token): index
        for token, index in tokenizer.get_vocab().items()
    }
    merges = [
        (token[:cut], token[cut:])
        for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    special = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    rebuilt = type(tokenizer)(vocab=vocabulary, merges=merges, add_bos_token=True, **special)
    rebuilt.chat_template = tokenizer.chat_template
    return rebuilt

"""Tell one base model from another, wherever its directory lies and whatever it is called.

An adapter means nothing on weights that it was not trained on, and two models of one architecture
differ in nothing but their weights' values. Reading all of them takes minutes, so a file's digest
covers its size, its safetensors header, and samples spread evenly over it: another fine-tune of the
same base moves nearly every weight, and so some of those that are sampled.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from swiftfp8.models.checkpoint import read_config_json, weight_files

_VOLATILE = ("_name_or_path", "transformers_version", "use_cache")  # say nothing of the model
_SAMPLES = 32
_SAMPLE_BYTES = 1024


def digest_model(path: Path) -> dict[str, str]:
    """A short digest of config.json and of each weight file of the model directory `path`."""
    config = {k: v for k, v in read_config_json(path).items() if k not in _VOLATILE}
    text = json.dumps(config, sort_keys=True)
    digests = {"config.json": _short(hashlib.sha256(text.encode()))}
    return digests | {file.name: _digest_weights(file) for file in weight_files(path)}


def _digest_weights(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        length = file.read(8)
        start = 8 + int.from_bytes(length, "little")
        digest.update(length + file.read(start - 8))
        last = max(size - _SAMPLE_BYTES, start)
        for sample in range(_SAMPLES):
            file.seek(start + (last - start) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return _short(digest)


def _short(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:16]

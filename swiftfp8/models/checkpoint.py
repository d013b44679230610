"""Check a checkpoint's files before anything is loaded from them.

transformers reports a truncated shard as a low-level error, a missing tensor as a warning, and
initialises at random what it can't find. A training run must not start like that, so the files are
checked first: config.json, the shard index, and each safetensors header against its file's size.
A safetensors file is an 8-byte little-endian header length n, n bytes of JSON that give each tensor
its byte range, and the data: its size must be 8 + n + the largest end of a range.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from swiftfp8.errors import SwiftFP8Error

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")
_MAX_HEADER = 100_000_000  # bytes; the safetensors format's own limit
_DOWNLOAD_AGAIN = "copy or download the file again"


def read_json(path: Path) -> Any:
    """The JSON content of `path`; a parse error names file, line and column."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        what = f"{path.name} is not valid JSON: it is nested too deep"
        raise SwiftFP8Error(what, where=str(path), fix=_DOWNLOAD_AGAIN) from error
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise SwiftFP8Error(
            f"{path.name} is not valid JSON: {error.msg}", where=where, fix=_DOWNLOAD_AGAIN
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SwiftFP8Error(f"{path.name} can't be read: {error}", where=str(path)) from error


def read_config_json(path: Path) -> dict[str, Any]:
    """config.json of the model directory `path`, as plain JSON."""
    file = path / "config.json"
    if not file.is_file():
        if (path / "adapter_config.json").is_file():
            raise SwiftFP8Error(
                "the directory holds a LoRA adapter, not a model",
                where=str(path),
                fix="give model= the base model that the adapter was trained on",
            )
        raise SwiftFP8Error(
            "no config.json: not a Hugging Face model directory",
            where=str(path),
            fix="give model= the directory that holds config.json and the safetensors files",
        )
    content = read_json(file)
    if not isinstance(content, dict):
        raise SwiftFP8Error("config.json is not a JSON object", where=str(file))
    if not content.get("model_type"):
        raise SwiftFP8Error(
            "config.json has no model_type, so the architecture is unknown",
            where=str(file),
            fix="take config.json from the model's original source",
        )
    return content


def check_checkpoint(path: Path) -> None:
    """Raise for anything wrong with the files of the model directory `path`.

    Weights are not read, only headers and sizes, so this is quick at any model size.
    """
    _refuse_quantized(read_config_json(path), path / "config.json")
    index = path / INDEX
    files = _indexed_tensors(index) if index.is_file() else {SINGLE: None}
    if not index.is_file() and not (path / SINGLE).is_file():
        raise _no_weights(path)
    for name, tensors in files.items():
        held = check_safetensors(path / name)
        absent = sorted((tensors or set()) - held)
        if absent:
            raise SwiftFP8Error(
                f"{name} lacks {len(absent)} tensors that the index places there, "
                f"first {absent[0]}",
                where=str(index),
                fix=_DOWNLOAD_AGAIN,
            )


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that hold the weights of the model directory `path`."""
    index = path / INDEX
    names = _indexed_tensors(index) if index.is_file() else [SINGLE]
    return [path / name for name in sorted(names)]


def check_safetensors(path: Path) -> set[str]:
    """The tensor names in a safetensors file, once its header and its size are sound."""
    if not path.is_file():
        raise SwiftFP8Error(
            f"weight file {path.name} is missing, though {INDEX} lists it",
            where=str(path.parent),
            fix="download the missing shard",
        )
    size = os.path.getsize(path)
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(_MAX_HEADER, size):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SwiftFP8Error(
            f"{path.name} is not a sound safetensors file (its header can't be read: {error})",
            where=str(path),
            fix="git-lfs pointer or cut-off download? " + _DOWNLOAD_AGAIN,
        ) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise SwiftFP8Error(
            f"{path.name} is {'truncated' if size < expected else 'too long'}: "
            f"expected {expected} bytes, found {size}",
            where=str(path),
            fix=f"{_DOWNLOAD_AGAIN}; `swiftfp8 export verify dir={path.parent}` checks them all",
        )
    return set(header)


def _indexed_tensors(index: Path) -> dict[str, set[str]]:
    """File name to the tensors that the shard index places in it."""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SwiftFP8Error(f"{INDEX} has no weight_map", where=str(index), fix=_DOWNLOAD_AGAIN)
    files: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        files.setdefault(name, set()).add(tensor)
    return files


def _no_weights(path: Path) -> SwiftFP8Error:
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    if shards:
        return SwiftFP8Error(
            f"found {shards[0]} but neither {SINGLE} nor {INDEX}",
            where=str(path),
            fix=f"download {INDEX} too, it says which tensor is in which file",
        )
    others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
    if others:
        return SwiftFP8Error(
            f"the weights are in {others[0]}; only safetensors files are read",
            where=str(path),
            fix="load the model with transformers and save_pretrained it, which writes safetensors",
        )
    return SwiftFP8Error(
        "the model directory has no weights",
        where=str(path),
        fix=f"it must hold {SINGLE}, or shards with {INDEX}",
    )


def _refuse_quantized(config: dict[str, Any], where: Path) -> None:
    """Fine-tuning starts from high-precision weights: an FP8 or 4-bit grid loses most updates."""
    text_config = config.get("text_config")
    nested = text_config.get("quantization_config") if isinstance(text_config, dict) else None
    settings = config.get("quantization_config") or nested
    if not settings:
        return
    method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else "unknown"
    raise SwiftFP8Error(
        f"the checkpoint is already quantized (quant_method {method}), which can't be trained yet",
        where=str(where),
        fix="use the BF16 checkpoint that it was made from; swiftfp8 quantizes it while training",
    )

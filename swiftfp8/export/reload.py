"""The export as a stranger gets it: loaded by plain transformers in a process of its own.

`python -m swiftfp8.export.reload DIR --ids IDS --out OUT` runs token ids (safetensors,
"ids" [B, T]) through the exported model and writes its logits ("logits" [B, T, V]) and, as
metadata, what was loaded: a checksum of every parameter, keys that were missing or unexpected. The
exporter compares both with its own dequantized model.
"""

from __future__ import annotations

import argparse
import inspect
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.export.checkpoint_io import as_buffer, read_json
from swiftfp8.models.task_model import auto_class_of

_SCALES_AT_RUN_TIME = (".input_scale", ".k_scale", ".v_scale")


def main() -> None:
    """Load, run, write."""
    parser = argparse.ArgumentParser(prog="python -m swiftfp8.export.reload")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ids", type=Path, required=True, help='safetensors with "ids" [B, T]')
    parser.add_argument("--out", type=Path, required=True, help="safetensors to write")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()

    from safetensors.torch import load_file, save_file

    torch.set_num_threads(arguments.threads)
    model, loading = load_plain(arguments.directory, arguments.trust_remote_code)
    logits = forward_logits(model, load_file(str(arguments.ids))["ids"])
    facts = json.dumps({"loading": loading, "checksums": checksums(model)})
    save_file({"logits": logits}, str(arguments.out), metadata={"facts": facts})


def load_plain(directory: Path, trust_remote_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """The model as `from_pretrained` gives it, and the keys that did not fit.

    Where transformers finds no FP8 device it dequantizes to BF16 while loading.
    """
    import transformers

    model_class = auto_class_of(read_json(directory / "config.json").get("architectures"))
    model, info = model_class.from_pretrained(
        directory,
        dtype="auto",
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **_dequantized(directory),
    )
    if _dequantized(directory):
        stop_rounding(model)
        # Nothing takes the scales of activations and of the cache then.
        info["unexpected_keys"] = {
            key for key in info["unexpected_keys"] if not key.endswith(_SCALES_AT_RUN_TIME)
        }
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    loading: dict[str, Any] = {kind: sorted(map(str, info[kind])) for kind in kinds}
    loading["transformers"] = transformers.__version__
    return model.eval(), loading


def quantization_section(directory: Path) -> dict[str, Any]:
    """`quantization_config` of a directory's config.json; {} where it has none."""
    return read_json(directory / "config.json").get("quantization_config") or {}


def _dequantized(directory: Path) -> dict[str, Any]:
    """What makes transformers dequantize compressed-tensors: else activations are rounded too."""
    if quantization_section(directory).get("quant_method") != "compressed-tensors":
        return {}
    from transformers import CompressedTensorsConfig

    known = inspect.signature(CompressedTensorsConfig.__init__).parameters
    options: dict[str, Any] = (
        {"dequantize": True} if "dequantize" in known else {"run_compressed": False}
    )
    return {"quantization_config": CompressedTensorsConfig(**options)}


def stop_rounding(model: Any) -> None:
    """Take what rounds, and its scales, from a dequantized model: transformers 5.17 leaves both."""
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        module.quantization_enabled = False
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            if name.endswith(("_scale", "_zero_point")):
                delattr(module, name)


def forward_logits(model: Any, ids_BT: Tensor) -> Tensor:
    """Logits [B, T, V] in the model's dtype; a classifier's [B, labels], an encoder's [B, T, K]."""
    with torch.inference_mode():
        output = model(input_ids=ids_BT, use_cache=False)
        logits: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return logits.contiguous().clone()


def checksums(model: Any) -> dict[str, int]:
    """CRC-32 of every parameter's and persistent buffer's bytes, by name."""
    return {name: zlib.crc32(_bytes(tensor)) for name, tensor in model.state_dict().items()}


def _bytes(tensor: Tensor) -> memoryview:
    return as_buffer(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))


if __name__ == "__main__":
    main()

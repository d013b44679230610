"""Is the export what it should be? Asked before it gets its name.

Three questions: do the files satisfy the format (`verify` of the format); did every parameter
arrive, bit for bit, in plain transformers in a fresh process; and are the logits those of the
exporter's own dequantized model, computed again from the source and not from the export. The fresh
process runs on the CPU, where transformers dequantizes while loading and the arithmetic of both
sides is the same, so bits can be compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.export.architecture import misfits
from swiftfp8.export.checkpoint_io import CheckpointReader, read_json
from swiftfp8.export.files import MODELOPT_CONFIG
from swiftfp8.export.fp8_reader import DequantizingReader, TensorReader, without_scales
from swiftfp8.export.layers import inspect_export
from swiftfp8.export.layout import ExportFormat, Fault, Layout
from swiftfp8.export.merge import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from swiftfp8.export.reload import checksums, forward_logits
from swiftfp8.export.source import Source, build_model
from swiftfp8.registry import discover, unknown

_LOGIT_TOLERANCE = 0.02  # of the largest logit: BF16 sums in another order, equal weights given
_ROWS, _LENGTH, _SEED = 2, 32, 0
_TEXT = (
    "The quick brown fox jumps over the lazy dog. Water boils at one hundred degrees Celsius at "
    "sea level, and lower on a mountain, because the air presses less on it there. How many legs "
    "do three spiders and two birds have together? Eight times three is twenty-four, and four more."
)
_SHOWN = 5
_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True, kw_only=True)
class ReloadCheck:
    """What the fresh process showed. `max_difference` is of logits, 0 where bits are equal."""

    tokens: int
    parameters: int
    bit_equal: bool
    max_difference: float
    transformers: str


@dataclass(frozen=True, kw_only=True)
class ReadBack:
    """Tensors read from the written files (dequantized if need be) and found equal; and why that.

    `obstacle` says why no other program read them.
    """

    tensors: int
    obstacle: str


def verify_directory(
    directory: Path, format_name: str | None = None, *, trust_remote_code: bool = False
) -> list[Fault]:
    """Faults of an exported directory, whoever wrote it, from its headers and bytes."""
    formats = discover("swiftfp8.export.formats")
    name = format_name or format_of(directory)
    if name not in formats:
        raise unknown("export format", name, formats)
    layers = None
    if name != "adapter":
        layers = inspect_export(directory, trust_remote_code=trust_remote_code)
    faults: list[Fault] = formats[name].verify(directory, layers)
    if layers is not None:
        faults += _misfits(directory, trust_remote_code)
    return faults


def _misfits(directory: Path, trust_remote_code: bool) -> list[Fault]:
    try:
        specs = without_scales(CheckpointReader(directory).specs)
    except SwiftFP8Error:
        return []  # the format's own check says what is wrong with the files
    return misfits(directory, specs, trust_remote_code=trust_remote_code)


def require_sound(faults: list[Fault]) -> tuple[str, ...]:
    """The warnings among `faults` as text; RunFailed where one is an error."""
    errors = [fault for fault in faults if fault.severity == "error"]
    if errors:
        listed = "\n".join(f"  {fault.where}: {fault.what}" for fault in errors[:_SHOWN])
        raise RunFailed(
            f"the export is faulty ({len(errors)} faults) and was not kept:\n{listed}",
            fix="report this fault of swiftfp8, with the model's config.json",
        )
    return tuple(f"{fault.where}: {fault.what}" for fault in faults)


def verify_reload(
    source: Source, layout: Layout, export_format: ExportFormat, directory: Path
) -> ReloadCheck:
    """Compare the export in a fresh process with the exporter's own dequantized model.

    Raises:
        RunFailed: a parameter or the logits differ, or the process could not load the export.
    """
    model = build_model(source, export_format.reference(source, layout))
    vocab_size = int(model.config.get_text_config().vocab_size)
    ids = token_ids(directory, vocab_size, trust_remote_code=source.trust_remote_code)
    expected, expected_sums = forward_logits(model, ids), checksums(model)
    del model
    logits, facts = _reload(directory, ids, source.trust_remote_code)
    _compare_keys(facts["loading"])
    _compare_parameters(expected_sums, facts["checksums"], layout)
    difference = float((logits.float() - expected.float()).abs().max())
    if not difference <= _LOGIT_TOLERANCE * float(expected.float().abs().max()):
        raise RunFailed(
            f"the reloaded export gives other logits (largest difference {difference:.3g}) though "
            "its weights are equal: its configuration differs from the base model's",
            where=str(directory / "config.json"),
        )
    return ReloadCheck(
        tokens=ids.numel(),
        parameters=len(expected_sums),
        bit_equal=torch.equal(logits, expected),
        max_difference=difference,
        transformers=facts["loading"]["transformers"],
    )


def reload_text(check: ReloadCheck, *, quantized: bool) -> str:
    """What a reload showed, in words; `quantized`: there was something to dequantize."""
    how = "dequantized on the CPU" if quantized else "on the CPU"
    equal = "logits bit-equal" if check.bit_equal else f"logits within {check.max_difference:.2g}"
    return (
        f"transformers {check.transformers}, fresh process, {how}: "
        f"{check.parameters} parameters equal, {equal}"
    )


def verify_read_back(
    source: Source, layout: Layout, export_format: ExportFormat, directory: Path, obstacle: str
) -> ReadBack:
    """Read the files with our own reader and compare with what the source gives, bit for bit.

    It shows that the files hold what was computed, not that another program understands them.

    Raises:
        RunFailed: a tensor is missing or differs.
    """
    if layout.format == "adapter":
        stored: TensorReader = CheckpointReader(directory, [directory / ADAPTER_WEIGHTS])
    else:
        stored = DequantizingReader(CheckpointReader(directory))
    tensors = 0
    for name, expected in export_format.reference(source, layout):
        found = stored.rows(name).to(expected.dtype) if name in stored.specs else None
        if found is None or not torch.equal(found, expected):
            raise RunFailed(
                f"{name} is not what was exported when it is read back",
                where=str(directory),
                fix="export again, and report it if it fails the same way",
            )
        tensors += 1
    return ReadBack(tensors=tensors, obstacle=obstacle)


def token_ids(directory: Path, vocab_size: int, *, trust_remote_code: bool = False) -> Tensor:
    """Token ids [B, 32]: random ones by a fixed seed, and a real text where a tokenizer is."""
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(vocab_size, (_ROWS, _LENGTH), generator=generator)
    if not (directory / "tokenizer_config.json").is_file():
        return ids
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    text = tokenizer(_TEXT)["input_ids"]
    text = (text * _LENGTH)[:_LENGTH]
    if not text or max(text) >= vocab_size:
        return ids
    return torch.cat([ids, torch.tensor([text])])


def _reload(directory: Path, ids: Tensor, trust_remote_code: bool) -> tuple[Tensor, dict[str, Any]]:
    """Run the worker; its logits and facts."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="swiftfp8-reload-") as folder:
        ids_file, out_file = Path(folder) / "ids.safetensors", Path(folder) / "out.safetensors"
        save_file({"ids": ids}, str(ids_file))
        command = [sys.executable, "-m", "swiftfp8.export.reload", str(directory)]
        command += ["--ids", str(ids_file), "--out", str(out_file)]
        command += ["--threads", str(torch.get_num_threads())]
        command += ["--trust-remote-code"] if trust_remote_code else []
        done = subprocess.run(
            command, env=reload_environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            tail = "\n".join(done.stderr.strip().splitlines()[-3:])
            raise RunFailed(
                f"transformers can't load the export in a fresh process:\n{tail}",
                where=str(directory),
            )
        with safe_open(str(out_file), framework="pt") as handle:
            facts: dict[str, Any] = json.loads(handle.metadata()["facts"])
            return handle.get_tensor("logits").clone(), facts


def reload_environment() -> dict[str, str]:
    """No GPU, no network, no process group; swiftfp8 importable from where it is now."""
    kept = {key: value for key, value in os.environ.items() if key not in _DISTRIBUTED}
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _compare_keys(loading: dict[str, Any]) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            names = ", ".join(loading[kind][:_SHOWN])
            raise RunFailed(f"the reloaded export has {kind.replace('_', ' ')}: {names}")


def _compare_parameters(expected: dict[str, int], loaded: dict[str, int], layout: Layout) -> None:
    different = [name for name, crc in expected.items() if loaded.get(name) != crc]
    different += [name for name in loaded if name not in expected]
    if different:
        kinds = [f"{n} ({'FP8' if n in layout.quantized else 'BF16'})" for n in different]
        raise RunFailed(
            f"{len(different)} of {len(expected)} parameters are not what was exported after a "
            f"reload, first {', '.join(kinds[:_SHOWN])}",
            fix="the export was not kept; export again, and report it if it fails the same way",
        )


def format_of(directory: Path) -> str:
    """The format of a directory that anybody wrote, by its configuration."""
    if (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file():
        return "adapter"
    section = read_json(directory / "config.json").get("quantization_config") or {}
    if not isinstance(section, dict):
        raise SwiftFP8Error(
            "quantization_config is no JSON object", where=str(directory / "config.json")
        )
    method = section.get("quant_method")
    if method == "modelopt" or (method is None and (directory / MODELOPT_CONFIG).is_file()):
        return "modelopt"
    if method is None:
        return "bf16"
    if method == "fp8":
        return "fp8_block" if section.get("weight_block_size") else "fp8"
    if method == "compressed-tensors":
        return "compressed_tensors"
    raise SwiftFP8Error(
        f"swiftfp8 can't check this quantization ({method})", where=str(directory / "config.json")
    )

"""The adapter itself, not merged: a PEFT directory for engines that serve LoRA beside a base.

adapter_config.json and adapter_model.safetensors as training wrote them, with the run's tokenizer.
The only format that loses nothing; the engine serves the base model as it is and adds the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import read_header, read_json
from swiftfp8.export.files import has_tokenizer
from swiftfp8.export.layers import ModelLayers
from swiftfp8.export.layout import Fault, FormatOptions, LayerError, Layout, WriteJob
from swiftfp8.export.merge import ADAPTER_CONFIG, ADAPTER_WEIGHTS, load_adapter
from swiftfp8.export.source import Source
from swiftfp8.export.structure import TOKENIZER

NAME = "adapter"


def describe(source: Source, options: FormatOptions) -> Layout:
    """The adapter's tensors, as they are."""
    adapter = source.checkpoint.adapter
    if adapter is None:
        raise SwiftFP8Error(
            "there is no adapter to export",
            where="export.format",
            fix="give adapter=<directory>, or a run of tuner=lora; or choose another format",
        )
    specs = [spec for spec, _ in read_header(adapter.directory / ADAPTER_WEIGHTS)]
    return Layout(
        format=NAME, tensors=tuple(specs), quantized=frozenset(), decisions=(), config=None
    )


def write(source: Source, layout: Layout, directory: Path, job: WriteJob) -> tuple[LayerError, ...]:
    """Copy the two files; nothing is computed."""
    adapter = source.checkpoint.adapter
    assert adapter is not None
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (directory / name).write_bytes((adapter.directory / name).read_bytes())
    job.advance(source.nbytes)
    return ()


def reference(source: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The adapter's own tensors."""
    from safetensors.torch import load_file

    adapter = source.checkpoint.adapter
    assert adapter is not None
    yield from load_file(str(adapter.directory / ADAPTER_WEIGHTS)).items()


def verify(directory: Path, layers: ModelLayers | None) -> list[Fault]:
    """A LoRA that PEFT and the engines read: files whole, pairs complete, numbers finite."""
    try:
        config = read_json(directory / ADAPTER_CONFIG)
        adapter = load_adapter(directory)
    except SwiftFP8Error as error:
        return [Fault(where=error.where or str(directory), what=error.what)]
    faults = []
    if not has_tokenizer(directory):
        faults.append(Fault(where=TOKENIZER, what="no tokenizer files"))
    if adapter.replaced:
        what = f"replaces whole weights, which vLLM refuses: {', '.join(sorted(adapter.replaced))}"
        faults.append(Fault(where=ADAPTER_WEIGHTS, what=what, severity="warning"))
    for name, tensor in adapter.replaced.items():
        if not bool(torch.isfinite(tensor).all()):
            faults.append(Fault(where=name, what="holds NaN or infinity"))
    return faults + _check_base(config)


def _check_base(config: dict[str, Any]) -> list[Fault]:
    base = config.get("base_model_name_or_path")
    if base and not Path(str(base)).is_absolute():
        return []
    what = f"names its base by a local path ({base})" if base else "names no base model"
    return [
        Fault(
            where=f"{ADAPTER_CONFIG}: base_model_name_or_path",
            what=f"{what}: serve it beside that model, or write the hub id there",
            severity="warning",
        )
    ]

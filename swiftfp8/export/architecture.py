"""Are a checkpoint's tensors those of its architecture? Asked of names and shapes alone.

transformers itself loads the names and shapes onto the meta device, where nothing takes memory: so
tied weights, renamed modules, experts stored one by one, and what a class lets go are judged as
they are when the model is loaded in earnest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.checkpoint_io import TensorSpec
from swiftfp8.export.layers import meta_model
from swiftfp8.export.layout import Fault
from swiftfp8.export.source import Source
from swiftfp8.models.quiet import quiet_transformers

_SHOWN = 5
_NOT_CHECKED = "has own code: whether its tensors are all there is not checked"


def misfits(
    directory: Path, specs: Mapping[str, TensorSpec], *, trust_remote_code: bool = False
) -> list[Fault]:
    """Tensors that the architecture of `directory` misses, does not have, or has in another shape.

    A pooler that is not there is a warning (an engine makes none up), and so is that a class with
    own code was not asked.
    """
    if not specs:
        return [Fault(where=str(directory), what="the weights hold no tensors")]
    config, empty = meta_model(directory, trust_remote_code)
    if empty.is_custom_code():
        return [Fault(where=str(directory), what=_NOT_CHECKED, severity="warning")]
    found = list(_found(config, empty, specs))
    if len(found) > _SHOWN + 1:
        rest = Fault(where=str(directory), what=f"{len(found) - _SHOWN} more tensors do not fit")
        return [*found[:_SHOWN], rest]
    return found


def require_fit(source: Source) -> None:
    """Refuse a base whose tensors are not those of its architecture.

    Raises:
        SwiftFP8Error: with the first of them.
    """
    specs = source.checkpoint.base.specs
    found = misfits(source.directory, specs, trust_remote_code=source.trust_remote_code)
    errors = [fault for fault in found if fault.severity == "error"]
    if errors:
        listed = "; ".join(f"{fault.where} {fault.what}" for fault in errors)
        raise SwiftFP8Error(
            f"the weights do not fit the architecture: {listed}",
            where=str(source.directory),
            fix="download or copy the model again, with the config.json that belongs to it",
        )


def _found(config: Any, empty: Any, specs: Mapping[str, TensorSpec]) -> Iterator[Fault]:
    config.dtype = torch.bfloat16
    try:
        with quiet_transformers():
            _, info = type(empty).from_pretrained(
                None,
                config=config,
                state_dict=_on_meta(specs),
                dtype=config.dtype,
                device_map={"": "meta"},
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError:  # tensors that become one, as experts do, are not all there
        yield from _unlike_own(empty, specs)
        return
    for name in sorted(info["missing_keys"]):
        kind = "warning" if "pooler" in name.split(".") else "error"
        yield Fault(where=name, what="is missing", severity=kind)
    for name, stored, own in sorted(info["mismatched_keys"]):
        what = f"has shape {tuple(stored)}, the architecture {tuple(own)}"
        yield Fault(where=name, what=what)
    for name in sorted(info["unexpected_keys"]):
        yield Fault(where=name, what="is no tensor of the architecture")


def _unlike_own(empty: Any, specs: Mapping[str, TensorSpec]) -> Iterator[Fault]:
    """Differences from the names and shapes under which transformers would save the model."""
    from transformers.core_model_loading import revert_weight_conversion

    own: dict[str, Tensor] = revert_weight_conversion(empty, empty.state_dict())
    differ = [name for name in own if name in specs and specs[name].shape != tuple(own[name].shape)]
    for name in differ:
        what = f"has shape {specs[name].shape}, the architecture {tuple(own[name].shape)}"
        yield Fault(where=name, what=what)
    missing = [
        name for name in own if name not in specs and name not in empty.all_tied_weights_keys
    ]
    for name in missing:
        yield Fault(where=name, what="is missing")
    if not differ and not missing:
        yield Fault(where="the weights", what="can't be put together as the architecture wants")


def _on_meta(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    return {
        name: torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")
        for name, spec in specs.items()
    }

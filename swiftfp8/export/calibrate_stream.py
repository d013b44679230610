"""A model's decoder layers run one after the other, with one layer's weights in memory.

The model is built without weights. Its embedding is loaded, and each decoder layer's forward is
replaced by one that notes its arguments (attention mask, position embeddings: the same for all
windows of one length) and passes the hidden states through; so the hidden states that reach the
first layer, and all that the layers are called with, come from the model's own code. After that a
layer is loaded, run over all windows, and let go.

Hidden states wait in CPU memory: windows x length x hidden size x 4 bytes. All arithmetic is
float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.source import Source
from swiftfp8.models.quiet import quiet_transformers

_IN_A_STACK = re.compile(r"(?P<stack>[^0-9]+)\.(?P<index>\d+)\.(?P<rest>.+)")
_FIX = "export without export.calibrate"


class _Recorded(Exception):
    """The last layer was reached; what follows it isn't needed."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What a decoder layer is called with, besides the hidden states."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


class DecoderStream:
    """The decoder layers of `source` and the calls that `windows_BT` make of them.

    `prefix` is the name of the stack of layers in the checkpoint, `count` how many it has,
    `hidden` the hidden states [1, T, H] of each window before the first layer.

    Raises:
        SwiftFP8Error: a model whose layers can't be loaded or run one at a time.
    """

    def __init__(
        self,
        source: Source,
        quantized: Iterable[str],
        windows_BT: Tensor,
        device: torch.device | str,
    ) -> None:
        _refuse_experts(source)
        self.source = source
        self.device = torch.device(device)
        self.prefix = _stack_of(source, quantized)
        model = _empty_model(source)
        if self.prefix not in dict(model.named_modules()):
            raise _stored_otherwise(self.prefix, source)
        self._layers: Any = model.get_submodule(self.prefix)
        self.count = len(self._layers)
        self._calls: list[_Call] = []
        self.hidden: list[Tensor] = self._enter(model, windows_BT)

    @contextmanager
    def loaded(self, index: int) -> Iterator[nn.Module]:
        """Layer `index` with its merged weights in float32 on the device; let go at the end."""
        layer = self._layers[index]
        self._fill(layer, f"{self.prefix}.{index}.")
        try:
            yield layer
        finally:
            _release(layer)

    def run(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Output [1, T, H] of a loaded layer, on the device."""
        call = self._calls[index]
        with torch.no_grad():
            output = layer(hidden.to(self.device), *call.arguments, **call.keywords)
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        return tensor

    def _enter(self, model: Any, windows_BT: Tensor) -> list[Tensor]:
        """Run what comes before the layers on every window, and note the layers' calls."""
        head = model.get_output_embeddings()
        for name, module in model.named_modules():
            if (
                name != self.prefix
                and not name.startswith(f"{self.prefix}.")
                and module is not head
            ):
                self._fill(module, f"{name}." if name else "", recurse=False)
        own = [layer.forward for layer in self._layers]
        first: list[Tensor] = []
        calls: list[_Call] = []
        for layer in self._layers:
            layer.forward = _recorder(calls, first, self.count)
        with torch.no_grad():
            for window_T in windows_BT:
                calls.clear()
                try:
                    model(input_ids=window_T[None].to(self.device), use_cache=False)
                except _Recorded:
                    self._keep_calls(calls)
        for layer, forward in zip(self._layers, own, strict=True):
            layer.forward = forward
        assert len(first) == len(windows_BT) and len(self._calls) == self.count
        return first

    def _keep_calls(self, calls: list[_Call]) -> None:
        """Keep the first window's calls; those of the others must be the same."""
        if not self._calls:
            self._calls = list(calls)
        elif not _same([vars(c) for c in calls], [vars(c) for c in self._calls]):
            raise SwiftFP8Error(
                "this model hands its layers more than hidden states, and it differs from text to "
                "text: they can't be calibrated one at a time",
                where=str(self.source.directory),
                fix=_FIX,
            )

    def _fill(self, module: nn.Module, prefix: str, *, recurse: bool = True) -> None:
        """Put merged weights into a module's parameters, in float32 on the device."""
        for name, parameter in list(module.named_parameters(recurse=recurse)):
            key = prefix + name
            if key not in self.source.tensors:
                raise _stored_otherwise(key, self.source)
            _set_parameter(module, name, self._merged(key).view(parameter.shape))
        for name, buffer in list(module.named_buffers(recurse=recurse)):
            owner = module.get_submodule(name.rpartition(".")[0])
            assert not buffer.is_meta, f"{prefix}{name} has no value"
            owner._buffers[name.rpartition(".")[2]] = buffer.to(self.device)

    def _merged(self, name: str) -> Tensor:
        pieces = [
            (piece if piece.dim() else piece[None]).to(torch.float32)
            for piece in self.source.pieces(name, device=self.device)
        ]
        return torch.cat(pieces)


def _release(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters()):
        _set_parameter(module, name, parameter.to("meta"))


def _set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, nn.Parameter(value, requires_grad=False))


def _recorder(calls: list[_Call], first: list[Tensor], count: int) -> Any:
    def record(hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if not calls:
            first.append(hidden_states.to("cpu"))
        calls.append(_Call(arguments=arguments, keywords=keywords))
        if len(calls) == count:
            raise _Recorded
        return hidden_states

    return record


def _empty_model(source: Source) -> Any:
    """The model with parameters on the meta device and buffers (rotary frequencies) computed."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM
    remote = source.trust_remote_code
    config = AutoConfig.from_pretrained(source.directory, trust_remote_code=remote)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with quiet_transformers(), init_empty_weights(include_buffers=False):
        model = model_class.from_config(config, dtype=torch.float32, trust_remote_code=remote)
    return model.eval()


def _stack_of(source: Source, quantized: Iterable[str]) -> str:
    """The name of the list of layers that hold the quantized weights."""
    found = {match["stack"] for name in quantized if (match := _IN_A_STACK.fullmatch(name))}
    if len(found) != 1:
        raise SwiftFP8Error(
            f"calibration needs one stack of decoder layers, this model has {len(found)}",
            where=str(source.directory),
            fix=_FIX,
        )
    return found.pop()


def _stored_otherwise(name: str, source: Source) -> SwiftFP8Error:
    return SwiftFP8Error(
        f"the checkpoint names {name} in another way than the model's class, so that its layers "
        "can't be loaded one at a time",
        where=str(source.directory),
        fix=_FIX,
    )


def _refuse_experts(source: Source) -> None:
    if source.layers.experts:
        raise SwiftFP8Error(
            "mixture-of-experts models can't be calibrated yet",
            where="export.calibrate",
            fix=_FIX,
        )


def _same(left: Any, right: Any) -> bool:
    """Equality of nested arguments with tensors; other objects count by type."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if left is None or isinstance(left, bool | int | float | str):
        return bool(left == right)
    return type(left) is type(right)

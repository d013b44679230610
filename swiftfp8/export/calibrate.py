"""Choose the rounding of every linear so that the layer's output on real text is kept.

Layer by layer, on windows of real rows:

    1. run the decoder layer on what the layers before it put out *as they will be served*, and add
       up G = X^T X of every linear's input X (linears with the same input share it)
    2. round each linear by `calibrate_round`, so that X Q^T keeps to X W^T; where that is not
       better than plain rounding on these inputs, take plain rounding
    3. put the rounded weights into the layer and run it again: the next layer's input

One layer's weights, in float32, and its G are in memory at a time; the FP8 result waits on disk
until the export's format asks for it, as a `Quantizer`. Nothing but the rounding differs from an
uncalibrated export: names, types, shapes and scales are the same.

The same machine, device and number of threads give the same bytes. A CPU and a GPU sum G in
another order, so that some weights that lie between two grid points may fall to the other side.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate_round import output_error, round_keeping_output
from swiftfp8.export.calibrate_stream import DecoderStream
from swiftfp8.export.checkpoint_io import CheckpointReader, CheckpointWriter, TensorSpec
from swiftfp8.export.layout import Layout
from swiftfp8.export.quantize import BLOCK, QuantizedTensor, dequantize, quantize_weight
from swiftfp8.export.source import Source

WINDOW = 512
_FEWEST_TOKENS = 256
_SCALE = "_scale"
# What shares a scale, by format; None: all columns.
_BLOCKS: dict[str, tuple[int, int | None]] = {"fp8_block": BLOCK, "compressed_tensors": (1, None)}
_ONE_FILE = 1 << 62


@dataclass(frozen=True, kw_only=True)
class CalibratedLayer:
    """A linear's output error on the calibration rows, ||X (Q - W)^T|| / ||X W^T||."""

    name: str
    rounded: float  # by plain rounding
    calibrated: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was calibrated, on how much text. Linears that no input reached are not listed."""

    rows: int
    tokens: int
    layers: tuple[CalibratedLayer, ...]

    @property
    def rounded(self) -> float:
        """Mean output error of plain rounding."""
        return sum(layer.rounded for layer in self.layers) / max(1, len(self.layers))

    @property
    def calibrated(self) -> float:
        """Mean output error of the calibrated weights."""
        return sum(layer.calibrated for layer in self.layers) / max(1, len(self.layers))


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """Windows of token ids [B, T], and how many rows they were cut from."""

    windows_BT: Tensor
    rows: int


class CalibratedWeights:
    """The layout's quantizer: hands out what calibration left on disk, plain rounding elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._reader = CheckpointReader(folder)

    def __call__(
        self,
        name: str,
        first_row: int,
        weight_NK: Tensor,
        block: tuple[int, int],
        scale: Tensor | None,
    ) -> QuantizedTensor:
        """Rows [first_row, first_row + N) of the calibrated weight `name`."""
        if name not in self._reader.specs:
            return quantize_weight(weight_NK, block, scale)
        assert scale is None and first_row % block[0] == 0
        stop = first_row + weight_NK.shape[0]
        data = self._reader.rows(name, first_row, stop)
        scales = self._reader.rows(name + _SCALE, first_row // block[0], -(-stop // block[0]))
        device = weight_NK.device
        return QuantizedTensor(data=data.to(device), scale=scales.to(device), block_shape=block)


def calibrate(
    source: Source,
    layout: Layout,
    text: CalibrationText,
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[CalibratedWeights, Calibration]:
    """Round the quantized linears of `layout` on `text`; the FP8 weights are left in `folder`.

    `advance` is told after each decoder layer how many of how many are done.

    Raises:
        SwiftFP8Error: a format with one scale for a whole tensor, a model whose layers can't be run
            one at a time, a weight that holds NaN or infinity.
    """
    if layout.format not in _BLOCKS:
        raise SwiftFP8Error(
            f"calibration chooses the rounding of {' and '.join(_BLOCKS)}, this export is "
            f"{layout.format}",
            where="export.calibrate",
            fix="set export.format=fp8_block, or export without export.calibrate",
        )
    block = _BLOCKS[layout.format]
    stream = DecoderStream(source, layout.quantized, text.windows_BT, device)
    names = [_names_in(stream, layout, index) for index in range(stream.count)]
    specs = [
        spec for group in names for name in group for spec in _specs(source.tensors[name], block)
    ]
    layers: list[CalibratedLayer] = []
    with CheckpointWriter(folder, specs, _ONE_FILE) as writer:
        for index in range(stream.count):
            layers += _calibrate_layer(stream, index, names[index], block, writer)
            advance(index + 1, stream.count)
    result = Calibration(rows=text.rows, tokens=text.windows_BT.numel(), layers=tuple(layers))
    return CalibratedWeights(folder), result


def calibration_text(
    rows: Sequence[Sequence[int]],
    tokens: int,
    *,
    seed: int,
    first_token: int | None = None,
    longest: int = WINDOW,
) -> CalibrationText:
    """Draw rows of token ids until there are `tokens`, and cut them into windows of one length.

    Rows are joined as in training with packing. `first_token` opens every window where a model
    wants its text opened.

    Raises:
        SwiftFP8Error: too little text.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    ids: list[int] = []
    used = 0
    for index in order:
        if len(ids) >= tokens:
            break
        ids += rows[index]
        used += 1
    ids = ids[: max(tokens, _FEWEST_TOKENS)]
    if len(ids) < _FEWEST_TOKENS:
        raise SwiftFP8Error(
            f"{len(ids)} tokens in {len(rows)} rows are too few to calibrate on",
            where="export.calibration_dataset",
            fix="give a few hundred rows of the text that the model is for",
        )
    opening = [] if first_token is None else [first_token]
    length = min(longest, WINDOW, len(ids)) - len(opening)
    windows = [
        opening + ids[start : start + length] for start in range(0, len(ids) - length + 1, length)
    ]
    return CalibrationText(windows_BT=torch.tensor(windows), rows=used)


def _calibrate_layer(
    stream: DecoderStream,
    index: int,
    names: list[str],
    block: tuple[int, int | None],
    writer: CheckpointWriter,
) -> list[CalibratedLayer]:
    """Round the linears `names` of one decoder layer and write them; move the stream past it."""
    errors = []
    prefix = f"{stream.prefix}.{index}."
    with stream.loaded(index) as layer:
        linears: dict[str, Any] = {
            name: layer.get_submodule(name.removeprefix(prefix).removesuffix(".weight"))
            for name in names
        }
        grams = _second_moments(stream, index, layer, linears)
        for name, linear in linears.items():
            quantized, error = _round(name, linear.weight.data, grams.get(name), block)
            errors += error
            writer.write(name, quantized.data)
            writer.write(name + _SCALE, quantized.scale)
            linear.weight.data = dequantize(quantized)
        for number, hidden in enumerate(stream.hidden):
            stream.hidden[number] = stream.run(index, layer, hidden).to("cpu")
    return errors


def _round(
    name: str, weight_NK: Tensor, gram_KK: Tensor | None, block: tuple[int, int | None]
) -> tuple[QuantizedTensor, list[CalibratedLayer]]:
    """The better of calibrated and plain rounding; plain where the linear was never reached."""
    shape = (block[0], block[1] or weight_NK.shape[1])
    plain = quantize_weight(weight_NK, shape)
    if gram_KK is None:
        return plain, []
    chosen = round_keeping_output(weight_NK, gram_KK, shape)
    before = output_error(weight_NK, plain, gram_KK)
    after = output_error(weight_NK, chosen, gram_KK)
    if after >= before:
        chosen, after = plain, before
    module = name.removesuffix(".weight")
    return chosen, [CalibratedLayer(name=module, rounded=before, calibrated=after)]


def _second_moments(
    stream: DecoderStream, index: int, layer: nn.Module, linears: dict[str, Any]
) -> dict[str, Tensor]:
    """G = X^T X [K, K] by weight name over all windows; linears with one input share a tensor."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, arguments: inputs.update({name: arguments[0]})

    hooks = [linear.register_forward_pre_hook(keep(name)) for name, linear in linears.items()]
    grams: dict[str, Tensor] = {}
    leaders: dict[str, str] = {}
    for hidden in stream.hidden:
        inputs.clear()
        stream.run(index, layer, hidden)
        if not leaders:
            leaders = _first_with_same_input(inputs)
        for name in inputs:
            if leaders[name] == name:
                x_TK = inputs[name].flatten(0, -2).to(torch.float32)
                if name not in grams:
                    grams[name] = torch.zeros(x_TK.shape[1], x_TK.shape[1], device=x_TK.device)
                grams[name].addmm_(x_TK.T, x_TK)
    for hook in hooks:
        hook.remove()
    return {name: grams[leader] for name, leader in leaders.items()}


def _first_with_same_input(inputs: dict[str, Tensor]) -> dict[str, str]:
    """For each linear, the first that was given the very same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in inputs.items()}


def _names_in(stream: DecoderStream, layout: Layout, index: int) -> list[str]:
    """Quantized weights of a decoder layer, in the order of the export."""
    prefix = f"{stream.prefix}.{index}."
    ordered = [spec.name for spec in layout.tensors if spec.name in layout.quantized]
    return [name for name in ordered if name.startswith(prefix)]


def _specs(spec: TensorSpec, block: tuple[int, int | None]) -> tuple[TensorSpec, TensorSpec]:
    rows, columns = spec.shape
    scales = (-(-rows // block[0]), -(-columns // (block[1] or columns)))
    return (
        TensorSpec(name=spec.name, dtype="F8_E4M3", shape=spec.shape),
        TensorSpec(name=spec.name + _SCALE, dtype="F32", shape=scales),
    )

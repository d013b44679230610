"""Calibrated rounding keeps outputs better than plain rounding, and changes nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_kit import FAMILIES, save_model, tiny_model
from torch import Tensor, nn

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.calibrate import Calibration, calibrate, calibration_text
from swiftfp8.export.calibrate_round import output_error, round_keeping_output
from swiftfp8.export.calibrate_stream import DecoderStream
from swiftfp8.export.export import find_format
from swiftfp8.export.layout import FormatOptions, Layout, WriteJob
from swiftfp8.export.quantize import FP8, FP8_MAX, dequantize, quantize_weight
from swiftfp8.export.source import Source, build_model, open_source


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def correlated_inputs(tokens: int, columns: int, rank: int) -> Tensor:
    """Inputs as a language model has them: few strong directions over a weak background."""
    torch.manual_seed(1)
    strong = torch.randn(tokens, rank) @ torch.randn(rank, columns)
    return strong + 0.1 * torch.randn(tokens, columns)


def correlated_model(directory: Path, family: str = "llama") -> Path:
    """A tiny model whose hidden states correlate, as trained ones do: its embedding is low-rank."""
    model = tiny_model(family)
    torch.manual_seed(3)
    strong = torch.randn(300, 12) @ torch.randn(12, 256)
    model.get_input_embeddings().weight.data = (strong + 0.1 * torch.randn(300, 256)).bfloat16()
    model.tie_weights()
    model.save_pretrained(directory)
    return directory


def windows(tokens: int = 512, vocabulary: int = 300) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(vocabulary, (64,), generator=generator).tolist() for _ in range(20)]
    return calibration_text(rows, tokens, seed=0, longest=64).windows_BT


def calibrated(
    directory: Path, folder: Path, name: str = "fp8_block"
) -> tuple[Source, Layout, Layout, Calibration]:
    """(source, plain layout, calibrated layout, what calibration says)."""
    source = open_source(directory)
    layout = find_format(name).describe(source, FormatOptions())
    folder.mkdir()
    text = calibration_text(windows().tolist(), 512, seed=0, longest=64)
    quantizer, calibration = calibrate(source, layout, text, folder)
    return source, layout, replace(layout, quantizer=quantizer), calibration


def test_output_error_falls_where_inputs_are_correlated() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    inputs = correlated_inputs(tokens=600, columns=384, rank=16)
    gram = inputs.T @ inputs
    plain, chosen = quantize_weight(weight), round_keeping_output(weight, gram)
    # seen: 0.10
    assert output_error(weight, chosen, gram) < 0.25 * output_error(weight, plain, gram)
    measured = (inputs @ (dequantize(chosen) - weight).T).norm() / (inputs @ weight.T).norm()
    assert output_error(weight, chosen, gram) == pytest.approx(float(measured), rel=1e-3)


def test_scales_stay_and_data_is_finite() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = 0.0
    weight[200, 300] = 40.0
    inputs = correlated_inputs(tokens=100, columns=384, rank=4)  # fewer inputs than columns
    chosen = round_keeping_output(weight, inputs.T @ inputs)
    assert torch.equal(chosen.scale, quantize_weight(weight).scale)
    assert chosen.data.dtype == FP8 and chosen.data.shape == weight.shape
    values = chosen.data.float()
    assert bool(torch.isfinite(values).all()) and float(values.abs().max()) <= FP8_MAX
    # its own values carry no error, so nothing is moved
    exact = dequantize(chosen)
    again = round_keeping_output(exact, inputs.T @ inputs)
    assert torch.equal(dequantize(again), exact)


def test_without_any_input_it_is_plain_rounding() -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    chosen = round_keeping_output(weight, torch.zeros(128, 128))
    assert torch.equal(dequantize(chosen), dequantize(quantize_weight(weight)))


def test_white_inputs_leave_plain_rounding() -> None:
    """G proportional to the identity: the output's error is the weight's, and nothing helps."""
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    chosen = round_keeping_output(weight, 3.0 * torch.eye(256))
    assert torch.equal(dequantize(chosen), dequantize(quantize_weight(weight)))


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_layers_give_the_models_hidden_states(tmp_path: Path, family: str) -> None:
    source = open_source(save_model(tmp_path, family))
    layout = find_format("fp8_block").describe(source, FormatOptions())
    batch = windows()[:3]
    stream = DecoderStream(source, layout.quantized, batch, "cpu")
    for index in range(stream.count):
        with stream.loaded(index) as layer:
            stream.hidden = [stream.run(index, layer, hidden) for hidden in stream.hidden]
        assert all(parameter.is_meta for parameter in layer.parameters())
    tensors = ((name, source.merged(name)) for name in source.tensors)
    model = build_model(source, tensors, dtype=torch.float32)
    last: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    with torch.no_grad():
        for window in batch:
            model(input_ids=window[None], use_cache=False)
    for expected, hidden in zip(last, stream.hidden, strict=True):
        torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)


CALIBRATED = ["fp8_block", "compressed_tensors"]


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_linear_keeps_its_output_better(tmp_path: Path, family: str, name: str) -> None:
    model = correlated_model(tmp_path / "m", family)
    _, layout, _, calibration = calibrated(model, tmp_path / "c", name)
    names = {f"{layer.name}.weight" for layer in calibration.layers}
    assert names == layout.quantized
    assert calibration.tokens == 512
    # seen: 0.12 and 0.13
    assert calibration.calibrated < 0.3 * calibration.rounded
    assert all(layer.calibrated <= layer.rounded for layer in calibration.layers)


@pytest.mark.parametrize("name", CALIBRATED)
def test_the_models_output_is_kept_better_on_other_text(tmp_path: Path, name: str) -> None:
    source, plain, layout, _ = calibrated(correlated_model(tmp_path / "m"), tmp_path / "c", name)
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(300, (4, 64), generator=generator)
    export_format = find_format(name)
    logits = []
    merged = ((name, source.merged(name)) for name in source.tensors)
    for tensors in (
        merged,
        export_format.reference(source, plain),
        export_format.reference(source, layout),
    ):
        model = build_model(source, tensors, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(input_ids=ids, use_cache=False).logits)
    exact, rounded, chosen = logits
    # seen: 0.15
    assert (chosen - exact).norm() < 0.4 * (rounded - exact).norm()


@pytest.mark.parametrize("name", CALIBRATED)
def test_checkpoint_is_an_ordinary_one_and_the_same_each_time(tmp_path: Path, name: str) -> None:
    model_dir = save_model(tmp_path / "m")
    export_format = find_format(name)
    files = []
    for attempt in ("plain", "once", "twice"):
        source, plain, layout, _ = calibrated(model_dir, tmp_path / f"c-{attempt}", name)
        out = tmp_path / attempt
        out.mkdir()
        chosen = plain if attempt == "plain" else layout
        export_format.write(source, chosen, out, WriteJob(max_shard_bytes=1 << 30))
        files.append((out / "model.safetensors").read_bytes())
    plain_bytes, once, twice = files
    assert once == twice
    assert once != plain_bytes and len(once) == len(plain_bytes)
    header = int.from_bytes(once[:8], "little")
    assert once[: header + 8] == plain_bytes[: header + 8]


def test_text_is_drawn_by_seed_and_cut_to_one_length() -> None:
    rows = [[n] * 100 for n in range(2, 30)]
    text = calibration_text(rows, 1000, seed=3, first_token=1)
    assert text.windows_BT.shape == (1, 512) and text.rows == 10
    assert int(text.windows_BT[0, 0]) == 1 and bool((text.windows_BT[0, 1:] > 1).all())
    again = calibration_text(rows, 1000, seed=3, first_token=1)
    other = calibration_text(rows, 1000, seed=4, first_token=1)
    assert torch.equal(text.windows_BT, again.windows_BT)
    assert not torch.equal(text.windows_BT, other.windows_BT)
    assert calibration_text(rows[:3], 1000, seed=0).windows_BT.shape == (1, 300)
    with pytest.raises(SwiftFP8Error, match="too few"):
        calibration_text(rows[:2], 1000, seed=0)


def test_what_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    text = calibration_text(windows().tolist(), 512, seed=0, longest=64)
    dense = open_source(save_model(tmp_path / "m"))
    layout = find_format("fp8_block").describe(dense, FormatOptions())
    moe = replace(dense, layers=replace(dense.layers, experts=("model.layers.0.mlp.experts",)))
    with pytest.raises(SwiftFP8Error, match="mixture-of-experts"):
        calibrate(moe, layout, text, tmp_path)
    renamed = [name.replace("model.", "model.language_model.") for name in layout.quantized]
    with pytest.raises(SwiftFP8Error, match="in another way than the model"):
        DecoderStream(dense, renamed, text.windows_BT, "cpu")
    for name in ("bf16", "fp8", "modelopt"):
        with pytest.raises(SwiftFP8Error, match=f"this export is {name}"):
            calibrate(dense, replace(layout, format=name), text, tmp_path)


def test_a_linear_that_is_never_run_is_rounded_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(save_model(tmp_path / "m"))
    layout = find_format("fp8_block").describe(source, FormatOptions())
    skipped = "model.layers.0.mlp.down_proj"

    class Skips(DecoderStream):
        def run(self, index: int, layer: nn.Module, hidden: Tensor) -> Tensor:
            if index == 0:
                layer.mlp.forward = lambda x: x
            return super().run(index, layer, hidden)

    monkeypatch.setattr("swiftfp8.export.calibrate.DecoderStream", Skips)
    text = calibration_text(windows().tolist(), 512, seed=0, longest=64)
    (tmp_path / "c").mkdir()
    quantizer, calibration = calibrate(source, layout, text, tmp_path / "c")
    assert skipped not in {layer.name for layer in calibration.layers}
    weight = source.merged(f"{skipped}.weight").float()
    found = quantizer(f"{skipped}.weight", 0, weight, (128, 128), None)
    assert torch.equal(dequantize(found), dequantize(quantize_weight(weight)))

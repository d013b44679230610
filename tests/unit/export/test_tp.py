"""Which numbers of GPUs an export divides by, and what is said where it does not."""

import re
from pathlib import Path

import pytest
from export_kit import save_model

from swiftfp8.config.compose import apply_overrides
from swiftfp8.config.schema import Config, ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.export import export_checkpoint, find_format
from swiftfp8.export.layout import FormatOptions
from swiftfp8.export.source import open_source
from swiftfp8.export.tp import judge_tp, tp_text


def verdicts(directory: Path, name: str, *sizes: int) -> dict[int, tuple[str, ...]]:
    source = open_source(directory)
    layout = find_format(name).describe(source, FormatOptions())
    return {v.size: v.problems for v in judge_tp(source, layout, sizes or (1, 2, 4, 8))}


def test_blocks_must_divide_on_both_sides(tmp_path: Path) -> None:
    """4 heads of 64, 2 KV heads, intermediate 384: blocks end inside a share from two GPUs on."""
    found = verdicts(save_model(tmp_path), "fp8_block")
    assert found[1] == ()
    assert found[2] == (
        "down_proj in 384 gives 192 a GPU, not blocks of 128",
        "gate_proj out 384 gives 192 a GPU, not blocks of 128",
        "up_proj out 384 gives 192 a GPU, not blocks of 128",
        "k_proj out 128 gives 64 a GPU, not blocks of 128",
        "v_proj out 128 gives 64 a GPU, not blocks of 128",
    )
    assert "q_proj out 256 gives 64 a GPU, not blocks of 128" in found[4]
    assert "o_proj in 256 gives 64 a GPU, not blocks of 128" in found[4]
    assert found[8][0] == "4 attention heads do not divide by 8"


def test_channels_need_multiples_of_16(tmp_path: Path) -> None:
    found = verdicts(save_model(tmp_path, intermediate_size=416), "compressed_tensors", 2, 4)
    assert found[2] == ()
    assert found[4] == (
        "down_proj in 416 gives 104 a GPU, not multiples of 16",
        "gate_proj out 416 gives 104 a GPU, not multiples of 16",
        "up_proj out 416 gives 104 a GPU, not multiples of 16",
    )


def test_kv_heads_are_repeated_where_there_are_more_gpus(tmp_path: Path) -> None:
    """2 KV heads of 128 on 4 or 8 GPUs: every GPU holds one whole head, a whole block."""
    directory = save_model(
        tmp_path, num_attention_heads=8, head_dim=128, intermediate_size=1024, hidden_size=1024
    )
    found = verdicts(directory, "fp8_block", 2, 3, 4, 8)
    assert (found[2], found[4], found[8]) == ((), (), ())
    assert found[3][:2] == (
        "8 attention heads do not divide by 3",
        "2 KV heads neither divide by 3 nor 3 by them",
    )


def test_what_stays_bf16_needs_whole_rows_only(tmp_path: Path) -> None:
    directory = save_model(tmp_path, intermediate_size=450)  # no multiple of 128: MLP in BF16
    found = verdicts(directory, "bf16", 2, 4)
    assert found[2] == ()
    assert "down_proj in 450 gives 112.5 a GPU, not a whole number" in found[4]


def test_experts_are_judged(tmp_path: Path) -> None:
    found = verdicts(save_model(tmp_path, "qwen3_moe"), "fp8_block", 2)
    assert "down_proj in 128 gives 64 a GPU, not blocks of 128" in found[2]


def test_asked_sizes_are_refused_before_writing_with_alternatives(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    settings = ExportConfig(format="fp8_block", tp=[1, 2], verify=False)
    with pytest.raises(SwiftFP8Error) as error:
        export_checkpoint(base, None, tmp_path / "export", settings)
    assert error.value.where == "export.tp"
    assert "tp=2: down_proj in 384 gives 192 a GPU" in error.value.what
    assert "model.layers.0.mlp.down_proj" in error.value.what
    assert error.value.fix and "export.format=compressed_tensors" in error.value.fix
    assert "export.tp=[1]" in error.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    for way in re.findall(r"export\.format=(\w+)", error.value.fix):
        other = ExportConfig(format=way, tp=[1, 2], verify=False)
        assert export_checkpoint(base, None, tmp_path / way, other).quantized


def test_leaving_layers_in_bf16_is_offered_where_it_helps(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", intermediate_size=512)  # only k and v do not divide
    settings = ExportConfig(format="fp8_block", tp=[2], verify=False)
    with pytest.raises(SwiftFP8Error) as error:
        export_checkpoint(base, None, tmp_path / "export", settings)
    assert "export.exclude=[k_proj,v_proj]" in (error.value.fix or "")
    settings = ExportConfig(format="fp8_block", tp=[2], exclude=["k_proj", "v_proj"], verify=False)
    assert export_checkpoint(base, None, tmp_path / "export", settings).quantized == 8


def test_the_report_says_what_fits_unasked(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    report = export_checkpoint(base, None, tmp_path / "export", ExportConfig(verify=False))
    text = dict(report.facts())["tensor parallel"]
    assert text.startswith("1 yes; 2 no: down_proj in 384 gives 192 a GPU")
    assert text.count("gives") < 4 and "more in export_report.json" in text
    assert tp_text(report.tensor_parallel) == text


def test_the_option_takes_a_number_or_a_list() -> None:
    assert ExportConfig(tp=4).tp == (4,)
    assert ExportConfig(tp=[8, 2, 2]).tp == (2, 8)
    assert apply_overrides(Config(), ["export.tp=[1,2]"]).export.tp == (1, 2)
    assert apply_overrides(Config(), ["export.tp=4"]).export.tp == (4,)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        ExportConfig(tp=[0])

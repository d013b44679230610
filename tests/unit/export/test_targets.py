"""Which format a model and an engine get, and what is refused."""

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from export_kit import save_model

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.layout import FormatOptions
from swiftfp8.export.source import open_source
from swiftfp8.export.targets import ENGINES, format_warnings, pick_format, require_loadable
from swiftfp8.registry import discover


def pick(directory: Path, target: str | None = None) -> str:
    return pick_format(open_source(directory), FormatOptions(), target)[0]


def test_every_engine_has_a_word_on_every_format() -> None:
    formats = set(get_args(get_type_hints(ExportConfig)["format"])) - {"auto"}
    assert set(discover("swiftfp8.export.formats")) == formats
    for engine in ENGINES.values():
        assert set(engine) == formats


def test_blocks_where_they_fit(tmp_path: Path) -> None:
    assert pick(save_model(tmp_path)) == "fp8_block"


@pytest.mark.parametrize("width", [448, 320])
def test_channels_where_most_weights_fit_no_block(tmp_path: Path, width: int) -> None:
    """hidden_size itself is odd: no linear fits a block, all fit multiples of 16."""
    save_model(tmp_path, hidden_size=width)
    assert pick(tmp_path) == pick(tmp_path, "vllm") == "compressed_tensors"
    assert pick(tmp_path, "lmdeploy") == "fp8_block"  # which then says that nothing fits


def test_a_format_that_the_engine_cannot_load_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "base")
    settings = ExportConfig(format="fp8", target="transformers")
    with pytest.raises(SwiftFP8Error, match="nonsense") as caught:
        export_checkpoint(tmp_path / "base", None, tmp_path / "export", settings)
    assert caught.value.fix and "fp8_block" in caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    with pytest.raises(SwiftFP8Error, match="lmdeploy can't serve"):
        require_loadable("compressed_tensors", "lmdeploy")
    require_loadable("fp8", "sglang")
    require_loadable("fp8", None)


def test_formats_that_transformers_reads_as_nonsense_say_so() -> None:
    assert "for vllm, sglang" in format_warnings("fp8")[0]
    assert format_warnings("fp8_block") == format_warnings("compressed_tensors") == ()

"""What a run was told, and what the export command is told, become one set of settings."""

from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from export_kit import save_model
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console

from swiftfp8.config.paths import assets_dir
from swiftfp8.config.schema import Config, ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.request import (
    check_export_after_training,
    check_export_of_model,
    export_settings,
    locate,
    resolve_request,
)
from swiftfp8.models import source
from swiftfp8.models.source import resolve_source
from swiftfp8.requests import ExportRequest, SourceRequest
from tests.unit.export.test_locate import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that ended with a BF16 export to a directory of its own."""
    run_dir = make_run(tmp_path)
    (run_dir / "resolved.yaml").write_text("export_dir: served\nexport_quantization_bit: 16\n")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return run_dir


def resolve(run: Path, *overrides: str, name: str = "export"):
    request = ExportRequest(run=str(run), overrides=overrides)
    return resolve_request(request, console=Console(), default_name=name)


def test_a_format_named_now_counts_and_bits_of_the_run_otherwise(run: Path) -> None:
    assert resolve(run).settings.format == "bf16"
    assert resolve(run, "export.format=fp8_block").settings.format == "fp8_block"
    assert resolve(run, "export=fp8_block").settings.format == "fp8_block"
    assert resolve(run, "export_quantization_bit=8").settings.format == "auto"
    with pytest.raises(SwiftFP8Error, match="unknown export option 'bf17'"):
        resolve(run, "export=bf17")


@pytest.mark.parametrize(
    ("bits", "named", "taken"),
    [
        (8, "auto", "auto"),  # what fits the model
        (8, "compressed_tensors", "compressed_tensors"),
        (8, "bf16", "bf16"),
        (16, "auto", "bf16"),
        (16, "fp8", "fp8"),
        (None, "fp8", "fp8"),
    ],
)
def test_a_format_that_is_set_counts_and_bits_stand_for_one(bits, named, taken) -> None:
    config = Config(export_quantization_bit=bits, export=ExportConfig(format=named))
    assert export_settings(config).format == taken


def test_bits_named_now_count_whatever_format_the_run_had(run: Path) -> None:
    (run / "resolved.yaml").write_text("export: {format: fp8}\nexport_quantization_bit: 8\n")
    assert resolve(run).settings.format == "fp8"
    assert resolve(run, "export_quantization_bit=16").settings.format == "bf16"
    assert resolve(run, "export_quantization_bit=null").settings.format == "fp8"
    both = ("export_quantization_bit=16", "export.format=compressed_tensors")
    assert resolve(run, *both).settings.format == "compressed_tensors"


@pytest.mark.parametrize("advice", ["compressed_tensors", "bf16"])
def test_a_model_that_fits_no_block_is_told_what_it_fits(tmp_path: Path, advice: str) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 416, "head_dim": 48}
    model = save_model(tmp_path / "model", "qwen3", **sizes)
    asked = Config(export_quantization_bit=8, export=ExportConfig(format="fp8_block"))
    with pytest.raises(SwiftFP8Error, match="no linear of this model can be FP8") as caught:
        check_export_of_model(asked, model)
    assert caught.value.fix == (
        "export with export.format=compressed_tensors, which takes 14 of its linears, or bf16"
    )
    taken = replace(asked, export=ExportConfig(format=advice))
    check_export_of_model(taken, model)  # the advice can be taken
    check_export_of_model(Config(export_quantization_bit=8), model)  # and auto finds it


def test_a_merge_does_not_go_where_the_run_was_exported(run: Path) -> None:
    assert resolve(run).export_dir == Path("served")
    assert resolve(run, name="merged").export_dir == run / "merged"
    assert resolve(run, "export_dir=there", name="merged").export_dir == Path("there")


def test_a_model_card_is_told_no_local_path(run: Path) -> None:
    context = resolve(run, f"model={run.parent / 'model'}").context
    assert context.base_name == "model"
    assert context.adapter_name is not None and not context.adapter_name.startswith("/")
    assert resolve(run, "model=Qwen/Qwen3-8B").context.base_name == "Qwen/Qwen3-8B"
    assert resolve(run, "model=/gone/model").context.base_name == "model"


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("model_type: tiny", "tiny"),
        ("model_type: qwen2.5", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("model: tiny", "tiny"),
    ],
)
def test_the_base_of_a_run_without_a_path_or_id(run: Path, told: str, name: str) -> None:
    """Also of a full fine-tuning, whose checkpoint is the model that is read."""
    (run / "resolved.yaml").write_text(f"{told}\n")
    assert resolve(run).context.base_name == name
    adapter = run / "checkpoint-10" / "adapter_config.json"
    adapter.unlink()
    adapter.with_name("config.json").write_text('{"model_type": "qwen3"}')
    assert resolve(run).context.base_name == name


def test_a_model_is_named_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered name, or a hub id with the same words where it can't be had."""
    for name in ("tiny", "Embedded"):
        found, adapter = locate(SourceRequest(model=name))
        assert found == assets_dir() / "tiny" and adapter is None
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SwiftFP8Error) as trained:
        resolve_source(Config(model="Owner/Model"))
    with pytest.raises(SwiftFP8Error) as asked:
        locate(SourceRequest(model="Owner/Model"))
    assert str(asked.value) == str(trained.value)
    assert "no local directory 'Owner/Model', and it can't be fetched" in str(asked.value)


def test_an_export_looks_where_hub_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        source, "download", lambda model, hub: asked.append((model, hub)) or assets_dir() / "tiny"
    )
    request = ExportRequest(
        model="Owner/Model", overrides=("hub=modelscope", "export_dir=somewhere")
    )
    job = resolve_request(request, console=Console())
    assert asked == [("Owner/Model", "modelscope")]
    assert job.context.base_name == "Owner/Model"


def offline(*args: object, **options: object) -> str:
    raise LocalEntryNotFoundError("no network")


def test_registered_texts_are_files() -> None:
    settings = ExportConfig(fidelity_dataset=["quickstart-unseen", "held_out.txt"])
    registered, file = export_settings(Config(export=settings)).fidelity_dataset
    assert Path(registered).is_file() and file == "held_out.txt"


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"exclude": ["nosuch_proj"]}, "'nosuch_proj' matches no linear"),
        ({"exclude": ["*_proj"]}, "no linear of this model can be FP8"),
        ({"format": "fp8", "target": "transformers"}, "can't serve the format fp8"),
    ],
)
def test_what_can_not_be_exported_is_found_before_training(tmp_path, settings, fault) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    config = Config(export=ExportConfig(**settings))
    check_export_of_model(config, model)  # nothing will be exported
    with pytest.raises(SwiftFP8Error, match=fault):
        check_export_of_model(replace(config, export_dir="out"), model)


def test_an_adapter_to_come_can_be_exported(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    config = Config(export=ExportConfig(format="adapter"), export_dir="out")
    check_export_of_model(config, model)
    with pytest.raises(SwiftFP8Error, match="no adapter"):
        check_export_of_model(replace(config, tuner="full"), model)


def test_a_bad_shard_size_is_found_before_training() -> None:
    bad = ExportConfig(max_shard_size="5XB")
    check_export_after_training(Config(export=bad))  # nothing will be exported
    with pytest.raises(SwiftFP8Error, match="not a size"):
        check_export_after_training(Config(export=bad, export_quantization_bit=8))


def test_the_export_that_a_resumed_run_has_is_found_before_training(run: Path) -> None:
    (run / "checkpoint-2").mkdir(exist_ok=True)
    resumed = Config(export_quantization_bit=8, resume_from_checkpoint=str(run / "checkpoint-2"))
    check_export_after_training(resumed)
    (run / "export").mkdir()
    (run / "export" / "config.json").touch()
    with pytest.raises(SwiftFP8Error, match="exists already") as caught:
        check_export_after_training(resumed)
    assert caught.value.where == str(run / "export")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ExportConfig(engine_python="/nope"), "no such Python"),
        (ExportConfig(fidelity_dataset=["empty.txt"]), "no text to compare on"),
        (ExportConfig(fidelity_dataset=["gone.txt"]), "no such file"),
    ],
)
def test_what_an_export_is_judged_by_is_looked_for_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: ExportConfig, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(SwiftFP8Error, match=said):
        check_export_after_training(Config(export_dir=str(tmp_path / "out"), export=settings))

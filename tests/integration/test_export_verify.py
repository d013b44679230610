"""`swiftfp8 export verify` on the command line: exit codes, and faults by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cli_kit import run_cli
from export_kit import save_model, save_tokenizer
from safetensors.torch import load_file, save_file

from swiftfp8.config.schema import ExportConfig
from swiftfp8.export.check import check_checkpoint
from swiftfp8.export.export import export_checkpoint


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify")
    base = save_model(root / "base", "llama")
    save_tokenizer(base)
    export_checkpoint(base, None, root / "export", ExportConfig(verify=False))
    return root / "export"


def test_a_sound_directory_and_one_with_a_fault(exported: Path, tmp_path: Path) -> None:
    done = run_cli("export", "verify", f"dir={exported}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fp8_block, sound" in done.stdout
    config = json.loads((exported / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = []
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in exported.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config["quantization_config"]["modules_to_not_convert"] = ["q_proj"]
    (broken / "config.json").write_text(json.dumps(config))
    done = run_cli("export", "verify", "dir=broken", cwd=tmp_path, env={"COLUMNS": "200"})
    assert done.returncode == 1
    assert "2 fault(s)" in done.stdout
    assert "'q_proj' is no full name of a linear" in done.stdout
    assert "the output head lm_head is not listed" in done.stdout


def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    for tokens in ((), ("dir=gone",), ("dir=.", "relaod=true")):
        done = run_cli("export", "verify", *tokens, cwd=tmp_path)
        assert done.returncode == 2, tokens
        assert "Traceback" not in done.stderr


def test_reload_compares_two_readers(exported: Path, tmp_path: Path) -> None:
    result = check_checkpoint(exported, reload=True)
    assert result.sound and "21 parameters equal, logits bit-equal" in result.checked


def test_reload_finds_tensors_that_no_module_takes(exported: Path, tmp_path: Path) -> None:
    """Complete in itself and yet not this architecture: headers do not show it, loading does."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in exported.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    file = str(copy / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["model.layers.7.input_layernorm.weight"] = torch.ones(256, dtype=torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    assert check_checkpoint(copy).sound
    result = check_checkpoint(copy, reload=True)
    assert not result.sound
    assert "layers.7" in result.faults[0].what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": [1]}, "quantization_config is no JSON object"),
        ({"num_attention_heads": "a"}, "transformers can't build this model"),
    ],
)
def test_a_configuration_that_nothing_can_read(
    exported: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    directory = Path(shutil.copytree(exported, tmp_path / "damaged"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    done = run_cli("export", "verify", f"dir={directory}", cwd=tmp_path)
    assert done.returncode in (1, 2) and said in done.stdout + done.stderr
    assert "this is a bug" not in done.stderr

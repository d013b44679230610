"""`swiftfp8 export verify` on the command line: exit codes, and faults by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_kit import run_cli
from export_kit import save_model, save_tokenizer
from safetensors.torch import load_file, save_file

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.check import check_checkpoint
from swiftfp8.export.export import export_checkpoint
from swiftfp8.export.verify import verify_directory

Change = Callable[[dict[str, torch.Tensor]], object]
UP = "model.layers.1.mlp.up_proj"


def edit_tensors(directory: Path, change: Change) -> None:
    """Change the tensors of a directory that holds one file."""
    file = str(directory / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


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


def take(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=torch.bfloat16)})


UNFIT: list[tuple[str, Change, str]] = [
    ("llama", dict.clear, "the weights hold no tensors"),
    ("llama", take("model.norm.weight"), "model.norm.weight is missing"),
    ("llama", take("lm_head.weight"), "lm_head.weight is missing"),
    (
        "llama",
        put("model.embed_tokens.weight", 10, 256),
        "embed_tokens.weight has shape (10, 256), the architecture (300, 256)",
    ),
    (
        "llama",
        put("model.layers.7.input_layernorm.weight", 256),
        "layers.7.input_layernorm.weight is no tensor of the architecture",
    ),
    (
        "qwen3_moe",
        take("model.layers.1.mlp.experts.2.up_proj.weight"),
        "model.layers.1.mlp.experts.2.up_proj.weight is missing",
    ),
    (
        "qwen3_moe",
        put("model.layers.1.mlp.experts.2.up_proj.weight", 64, 256),
        "experts.2.up_proj.weight has shape (64, 256), the architecture (128, 256)",
    ),
]


@pytest.mark.parametrize(("family", "change", "said"), UNFIT)
def test_weights_that_are_not_the_architectures(
    tmp_path: Path, family: str, change: Change, said: str
) -> None:
    """Files complete in themselves: headers alone show it, and no export is made of them."""
    base = save_tokenizer(save_model(tmp_path / "base", family))
    edit_tensors(base, change)
    faults = check_checkpoint(base).faults
    assert [f"{fault.where} {fault.what}".endswith(said) for fault in faults] == [True]
    with pytest.raises(SwiftFP8Error, match="do not fit the architecture") as caught:
        export_checkpoint(base, None, tmp_path / "export", ExportConfig(verify=False))
    assert said in caught.value.what and caught.value.exit_code == 2
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("format_name", ["bf16", "fp8_block"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", torch.nan),
        ("model.norm.weight", -torch.inf),
        ("lm_head.weight", 3.4e38),  # infinite once it is BF16
    ],
)
def test_what_stays_bf16_must_be_finite(
    tmp_path: Path, format_name: str, name: str, value: float
) -> None:
    base = save_model(tmp_path / "base")

    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({n: tensor.float() for n, tensor in tensors.items()})
        tensors[name].view(-1)[5] = value

    edit_tensors(base, plant)
    settings = ExportConfig(verify=False, format=format_name)
    with pytest.raises(SwiftFP8Error, match="a weight holds NaN or infinity") as caught:
        export_checkpoint(base, None, tmp_path / "export", settings)
    assert caught.value.where == name
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("name", ["model.norm.weight", f"{UP}.weight"])
def test_a_tensor_gone_from_an_export(exported: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(exported, tmp_path / "copy"))
    edit_tensors(copy, lambda tensors: [tensors.pop(n) for n in list(tensors) if name in n])
    faults = [f"{fault.where} {fault.what}" for fault in check_checkpoint(copy).faults]
    assert faults == [f"{name} is missing"]


def test_of_many_tensors_that_do_not_fit_the_first_are_named(tmp_path: Path) -> None:
    base = save_tokenizer(save_model(tmp_path / "base"))
    edit_tensors(base, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.1" in n])
    faults = check_checkpoint(base).faults
    assert len(faults) == 6 and faults[-1].what == "4 more tensors do not fit"


def test_an_old_name_of_a_buffer_is_let_go(tmp_path: Path) -> None:
    """What transformers drops without a word is no fault."""
    base = save_tokenizer(save_model(tmp_path / "base"))
    edit_tensors(base, put("model.layers.0.self_attn.rotary_emb.inv_freq", 32))
    assert check_checkpoint(base).faults == ()


ODD_SECTIONS: list[tuple[str, dict[str, object], str]] = [
    ("compressed_tensors", {"config_groups": [1]}, "config_groups is [1], not an object"),
    ("compressed_tensors", {"config_groups": {"g": "x"}}, "has 'x' in place of an object"),
    *(
        ("compressed_tensors", {"config_groups": {"g": {key: value}}}, f"{key} is {value!r}, not")
        for key, value in (
            ("weights", "x"),
            ("input_activations", "x"),
            ("targets", 5),
            ("targets", ["re:("]),
        )
    ),
    (
        "compressed_tensors",
        {"config_groups": {"g": {"weights": {"block_structure": 128}}}},
        "block_structure is 128, not a list of lengths",
    ),
    ("compressed_tensors", {"ignore": ["re:["]}, "ignore is ['re:['], not a list of names"),
    ("compressed_tensors", {"ignore": [5]}, "ignore is [5], not a list of names"),
    ("compressed_tensors", {"kv_cache_scheme": "x"}, "kv_cache_scheme is 'x', not an object"),
    ("fp8_block", {"weight_block_size": 128}, "weight_block_size is 128, not a list of lengths"),
    ("fp8", {"modules_to_not_convert": "lm_head"}, "not_convert is 'lm_head', not a list"),
    ("modelopt", {"ignore": 5}, "ignore is 5, not a list of names"),
]


@pytest.mark.parametrize(("format_name", "changes", "said"), ODD_SECTIONS)
def test_a_section_of_odd_types_is_a_fault(
    exported: Path, tmp_path: Path, format_name: str, changes: dict[str, object], said: str
) -> None:
    directory = Path(shutil.copytree(exported, tmp_path / "odd"))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").write_text("{}")
    assert [said in fault.what for fault in verify_directory(directory, format_name)] == [True]


@pytest.mark.parametrize(
    "legacy", [{"quantization": "x"}, {"quantization": {"exclude_modules": 5}}]
)
def test_modelopts_own_file_of_odd_types(
    exported: Path, tmp_path: Path, legacy: dict[str, object]
) -> None:
    directory = Path(shutil.copytree(exported, tmp_path / "odd"))
    (directory / "hf_quant_config.json").write_text(json.dumps(legacy))
    faults = verify_directory(directory, "modelopt")
    assert len(faults) == 1 and ", not a" in faults[0].what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": "fp8"}, "quantization_config is no JSON object"),
        ({"quantization_config": [1]}, "quantization_config is no JSON object"),
        ({"num_attention_heads": 0}, "transformers can't build this model"),
        ({"num_key_value_heads": 0}, "transformers can't build this model"),
        ({"dtype": "float7"}, "transformers can't build this model"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            "quantized already",
        ),
    ],
)
def test_a_base_with_an_odd_configuration(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    base = save_model(tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(SwiftFP8Error, match=said) as caught:
        export_checkpoint(base, None, tmp_path / "export", ExportConfig(verify=False))
    assert caught.value.exit_code == 2 and caught.value.where and caught.value.fix


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


def test_a_configuration_nested_too_deep(exported: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(exported, tmp_path / "deep"))
    (directory / "config.json").write_text('{"a":' * 100_000)
    done = run_cli("export", f"model={directory}", "export_dir=out", cwd=tmp_path)
    assert done.returncode == 2 and "config.json is not valid JSON" in done.stderr

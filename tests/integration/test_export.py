"""Exports of real (tiny) models: what a fresh process loads is what was computed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from export_kit import FAMILIES, save_model, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftfp8.config.schema import ExportConfig
from swiftfp8.errors import RunFailed, SwiftFP8Error
from swiftfp8.export.export import export_checkpoint, find_format, merge_checkpoint
from swiftfp8.export.layout import FormatOptions
from swiftfp8.export.source import open_source
from swiftfp8.export.verify import verify_reload


def save_adapter(directory: Path, family: str) -> Path:
    model = get_peft_model(
        tiny_model(family), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_reload_is_bit_equal(tmp_path: Path, family: str) -> None:
    base = save_model(tmp_path / "base", family)
    adapter = save_adapter(tmp_path / "adapter", family)
    report = export_checkpoint(base, adapter, tmp_path / "export", ExportConfig())
    assert report.reload and report.reload.bit_equal and report.reload.max_difference == 0.0
    assert (report.merged, report.quantized) == (14, 14)
    assert all(0.02 < layer.relative_error < 0.03 for layer in report.layers)
    stored = load_file(str(tmp_path / "export" / "model.safetensors"))
    assert ("lm_head.weight" in stored) == (family in ("llama", "qwen3"))
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) == 14
    section = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]
    assert section == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 448}, {"intermediate_size": 384, "num_key_value_heads": 1}]
)
def test_odd_shapes_stay_bf16_and_reload(tmp_path: Path, changes: dict[str, int]) -> None:
    base = save_model(tmp_path / "base", "llama", **changes)
    settings = ExportConfig(format="fp8_block", max_shard_size="400KB")
    report = export_checkpoint(base, None, tmp_path / "export", settings)
    assert report.reload and report.reload.bit_equal
    assert report.quantized == 8
    assert report.shards > 1
    listed = json.loads((tmp_path / "export" / "config.json").read_text())
    listed = listed["quantization_config"]["modules_to_not_convert"]
    assert sorted(listed) == sorted(report.kept)


def test_merge_in_bf16_gives_the_adapters_logits(tmp_path: Path) -> None:
    """PEFT's float32 merge rounded to BF16 is what we write, but for rare ties of the last bit."""
    base = save_model(tmp_path / "base", "qwen3")
    adapter = save_adapter(tmp_path / "adapter", "qwen3")
    report = merge_checkpoint(base, adapter, tmp_path / "merged", ExportConfig())
    assert report.format == "bf16" and report.reload and report.reload.bit_equal
    from peft import PeftModel

    reference = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    ).merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    expected = reference.state_dict()
    for name, tensor in merged.state_dict().items():
        ours, theirs = tensor.float(), expected[name].bfloat16().float()
        assert (ours != theirs).float().mean() < 1e-3
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-6)
    unmerged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter)
    )
    ids = torch.arange(40)[None]
    with torch.no_grad():
        wanted, got = unmerged(ids).logits, merged.float()(ids).logits
    # one rounding of each weight to 8 bits of mantissa (2**-9), two layers deep
    assert (got - wanted).norm() / wanted.norm() < 2.0**-7


def test_float16_and_float32_bases_become_bf16(tmp_path: Path) -> None:
    for name in ("float16", "float32"):
        base = tmp_path / name
        tiny_model("qwen2").to(getattr(torch, name)).save_pretrained(base)
        settings = ExportConfig(verify=name == "float32")
        report = export_checkpoint(base, None, tmp_path / f"{name}-out", settings)
        assert report.quantized == 14
        stored = load_file(str(tmp_path / f"{name}-out" / "model.safetensors"))
        assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_changed_byte_fails_the_reload_with_the_layers_name(tmp_path: Path) -> None:
    """A wrong scale passes the structure check: the reload is what sees it."""
    base = save_model(tmp_path / "base")
    export_checkpoint(base, None, tmp_path / "export", ExportConfig(verify=False))
    file = str(tmp_path / "export" / "model.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[f"{name}_scale_inv"][0, 0] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    source, export_format = open_source(base), find_format("fp8_block")
    layout = export_format.describe(source, FormatOptions())
    with pytest.raises(RunFailed, match=f"1 of 21 parameters.*{name}"):
        verify_reload(source, layout, export_format, tmp_path / "export")


def test_a_fault_found_by_verification_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RunFailed("planted")

    base = save_model(tmp_path / "base")
    monkeypatch.setattr("swiftfp8.export.export.verify_reload", fail)
    with pytest.raises(RunFailed, match="planted"):
        export_checkpoint(base, None, tmp_path / "export", ExportConfig())
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_sources_are_never_overwritten(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    with pytest.raises(SwiftFP8Error, match="made from"):
        export_checkpoint(base, None, base, ExportConfig(overwrite=True))
    assert (base / "model.safetensors").exists()


SLOW_EXPORT = """
import sys, time
from pathlib import Path
from swiftfp8.config.schema import ExportConfig
from swiftfp8.export import checkpoint_io
from swiftfp8.export.export import export_checkpoint
write = checkpoint_io.CheckpointWriter.write
def slow(self, name, piece):
    print("writing", flush=True)
    time.sleep(0.2)
    return write(self, name, piece)
checkpoint_io.CheckpointWriter.write = slow
export_checkpoint(Path(sys.argv[1]), None, Path(sys.argv[2]), ExportConfig())
"""


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    repository = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_EXPORT, str(base), str(tmp_path / "out" / "export")],
        env={**os.environ, "PYTHONPATH": repository},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        while "writing" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.3)
        assert list((tmp_path / "out").glob("export.partial-*"))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode != 0
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


MEMORY = """
import resource, sys
from pathlib import Path
from swiftfp8.config.schema import ExportConfig
from swiftfp8.export.export import export_checkpoint
import torch, transformers, peft
from transformers import AutoModelForCausalLM
tiny, big, out = map(Path, sys.argv[1:])
export_checkpoint(tiny, None, out / "tiny", ExportConfig(verify=False))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_checkpoint(big, None, out / "big", ExportConfig(verify=False))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A source of 150 MiB, its largest tensor 24 MiB, costs less than 80 MiB over a tiny one's."""
    tiny = save_model(tmp_path / "tiny")
    big = save_model(
        tmp_path / "big",
        hidden_size=1536,
        intermediate_size=8192,
        num_attention_heads=12,
        head_dim=128,
    )
    size = (big / "model.safetensors").stat().st_size / 2**20
    assert size > 150
    repository = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tiny), str(big), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": repository, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 80

"""The real command line on a real GPU: a Qwen2.5-0.5B-shaped model learns the quickstart's rows.

All runs start at once, each a process of its own on the one GPU, and every test reads what they
left: those that train (LoRA and full, with and without gradient checkpointing, in BF16 and in FP8
by both backends), and one that is killed on its way and resumed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from swiftfp8.config.paths import assets_dir

STEPS = 100
KILL_AFTER, SAVED_AT = 55, 40
RATES = {"lora": 1e-3, "full": 1e-4}
RUNS = {
    "bf16-lora": ("lora", ["dtype=bf16"]),
    "te-lora": ("lora", ["precision.backend=te"]),
    "torch-lora": ("lora", ["precision.backend=torch"]),
    "torch-lora-checkpointing": (
        "lora", ["precision.backend=torch", "gradient_checkpointing=full"],
    ),
    "bf16-full": ("full", ["dtype=bf16"]),
    "te-full": ("full", ["precision.backend=te"]),
    "te-full-checkpointing": ("full", ["precision.backend=te", "gradient_checkpointing=full"]),
    "torch-full": ("full", ["precision.backend=torch"]),
    "torch-full-checkpointing": (
        "full", ["precision.backend=torch", "gradient_checkpointing=full"],
    ),
    "killed": ("lora", ["precision.backend=torch"]),
}  # fmt: skip
FP8_RUNS = [name for name in RUNS if name.startswith(("te", "torch"))]
LIMIT_S = 240


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where the runs lie, and the model they began from."""

    folder: Path
    model: Path

    def losses(self, name: str) -> dict[int, float]:
        """Training loss by step."""
        lines = (self.folder / name / "logging.jsonl").read_text().splitlines()
        parsed = [json.loads(line) for line in lines]
        return {line["step"]: line["loss"] for line in parsed if "loss" in line}

    def last(self, name: str) -> Path:
        """The last checkpoint."""
        return self.folder / name / "last"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    model = save_model(folder / "qwen-half-billion")
    processes = {name: start(folder, model, name) for name in RUNS}
    try:
        kill_after(folder / "killed", KILL_AFTER, processes["killed"])
        resumed = start(folder, model, "killed", resume=True)
        processes["killed"] = resumed
        for name, process in processes.items():
            code = process.wait(timeout=LIMIT_S)
            log = (folder / f"{name}.log").read_text()
            assert code == 0, f"{name} ended with exit code {code}:\n{log[-3000:]}"
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return Runs(folder=folder, model=model)


def save_model(path: Path) -> Path:
    """Random weights in Qwen2.5-0.5B's shape, with the package's own small tokenizer."""
    tiny = assets_dir() / "tiny"
    own = AutoConfig.from_pretrained(tiny)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=own.bos_token_id,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(path)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny / file).is_file():
            shutil.copy(tiny / file, path / file)
    return path


def start(folder: Path, model: Path, name: str, *, resume: bool = False) -> subprocess.Popen:
    """Begin `swiftfp8 train` in a process group of its own; it logs to <name>.log."""
    tuner, extra = RUNS[name]
    overrides = [
        f"model={model}",
        "model_type=qwen2_5",
        f"tuner={tuner}",
        f"learning_rate={RATES[tuner]}",
        f"max_steps={STEPS}",
        "lora_rank=16",
        "lora_alpha=32",
        "val_dataset=[]",
        "max_length=128",
        "train.logging_steps=1",
        "train.eval_steps=0",
        f"train.save_steps={SAVED_AT if tuner == 'lora' else 0}",
        "train.images=false",
        f"output_dir={folder}",
        f"run_name={name}",
        *extra,
    ]
    if resume:
        overrides.append(f"resume_from_checkpoint={folder / name}")
    return command("train", "config=quickstart", *overrides, log=folder / f"{name}.log")


def command(*arguments: str, log: Path) -> subprocess.Popen:
    with log.open("a") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "swiftfp8", *arguments],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )


def kill_after(run_dir: Path, step: int, process: subprocess.Popen) -> None:
    """SIGKILL, once `step` is in the log: no handler runs, nothing is saved."""
    log = run_dir / "logging.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not (log.is_file() and f'"step": {step},' in log.read_text()):
        output = (run_dir.parent / f"{run_dir.name}.log").read_text()
        assert process.poll() is None, f"ended before it was killed:\n{output[-3000:]}"
        assert time.monotonic() < deadline, f"never came to step {step}:\n{output[-3000:]}"
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def mean_of_last(losses: dict[int, float], steps: int = 10) -> float:
    chosen = [losses[step] for step in range(STEPS - steps + 1, STEPS + 1)]
    return sum(chosen) / len(chosen)


@pytest.mark.parametrize("name", FP8_RUNS)
def test_what_was_planned_for_fp8_ran_in_fp8(runs: Runs, name: str) -> None:
    report = json.loads((runs.folder / name / "precision_report.json").read_text())
    assert report["measured"]["kept"] >= 0.95
    assert report["measured"]["missing"] == {}
    plan = json.loads((runs.folder / name / "plan.json").read_text())
    fp8 = [layer for layer in plan["layers"] if layer["precision"].startswith(("fp8", "mxfp8"))]
    assert len(fp8) == 24 * 7
    assert plan["backend"] == name.split("-")[0]


@pytest.mark.parametrize("name", FP8_RUNS)
def test_loss_is_within_one_percent_of_bf16_after_100_steps(runs: Runs, name: str) -> None:
    expected = runs.losses("bf16-" + name.split("-")[1])
    losses = runs.losses(name)
    assert mean_of_last(losses) < 0.8 * losses[1]
    assert mean_of_last(losses) == pytest.approx(mean_of_last(expected), rel=0.01)
    assert all(math.isfinite(loss) for loss in losses.values())


def test_a_killed_run_resumes_to_the_same_losses(runs: Runs) -> None:
    uninterrupted, resumed = runs.losses("torch-lora"), runs.losses("killed")
    assert set(resumed) == set(range(1, STEPS + 1))
    assert resumed[STEPS] == pytest.approx(uninterrupted[STEPS], rel=1e-3)
    assert mean_of_last(resumed) == pytest.approx(mean_of_last(uninterrupted), rel=1e-3)


def test_the_adapter_loads_in_plain_peft(runs: Runs) -> None:
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.bfloat16).cuda()
    tokenizer = AutoTokenizer.from_pretrained(runs.model)
    tokens = tokenizer("What is the speed of light?", return_tensors="pt").to("cuda")
    inputs = {"input_ids": tokens["input_ids"]}
    with torch.no_grad():
        before = base(**inputs).logits.float()
        adapted = PeftModel.from_pretrained(base, runs.last("torch-lora"))
        after = adapted(**inputs).logits.float()
        merged = adapted.merge_and_unload()(**inputs).logits.float()
    change = (after - before).norm()
    assert change > 0.1 * before.norm()
    # The merged weights are rounded to BF16 once more, in each of 24 layers.
    assert (merged - after).norm() < 0.1 * change


def test_a_fully_trained_checkpoint_is_a_plain_model(runs: Runs) -> None:
    folder = runs.last("torch-full")
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder) is not None
    assert model.get_input_embeddings().weight.shape == (151936, 896)


def test_the_export_reloads(runs: Runs) -> None:
    log = runs.folder / "export.log"
    process = command("export", f"run={runs.folder / 'torch-lora'}", log=log)
    assert process.wait(timeout=LIMIT_S) == 0, log.read_text()[-3000:]
    exported = runs.folder / "torch-lora" / "export"
    settings = json.loads((exported / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "fp8" and settings["weight_block_size"] == [128, 128]
    script = (
        # transformers' own FP8 matmul needs the `kernels` package; its reader is tested here
        "import sys, torch; from transformers import AutoModelForCausalLM as M;"
        "from transformers import FineGrainedFP8Config as C;"
        "m = M.from_pretrained(sys.argv[1], quantization_config=C(dequantize=True)).cuda();"
        "y = m(input_ids=torch.arange(1, 17, device='cuda')[None]).logits;"
        "assert torch.isfinite(y).all() and y.shape == (1, 16, 151936)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(exported)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]

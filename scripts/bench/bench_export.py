#!/usr/bin/env python3
"""Speed and memory of the export: a model of a chosen size is made, exported, and deleted again.

    python scripts/bench/bench_export.py                                  # 1 GiB, fp8_block
    python scripts/bench/bench_export.py --size-gib 8 --repeat 3 --out results.json
    python scripts/bench/bench_export.py --size-gib 8 --lora-rank 16 --format compressed_tensors
    python scripts/bench/bench_export.py --size-gib 8 --no-reload --dir /scratch

The model has the shapes of Llama or Qwen, as many layers as the size asks for, Gaussian weights in
BF16 and several shards, just read and so in the file cache. Each export runs in a process of its
own. The speed is bytes of the source over all seconds of the export, from opening the files to the
directory's final name, the check of everything written included. Only the reload by transformers in
a fresh process is left out of it (`export.verify=false`): that loads the whole model twice, by
somebody else's code. One more export with it is reported beside the others, unless --no-reload.
`peak` is the largest resident memory of the exporting process (not of the process that reloads);
the limit that it is held to is two shards and 1.5 GiB.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-1b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "llama3-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
        "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
GIB, MIB = 2**30, 2**20
ALLOWED = 1.5 * GIB  # beside two shards


def main() -> int:
    args = parse()
    if args.worker:
        return worker(args)
    parent = Path(args.dir) if args.dir else None
    if parent:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-export-", dir=parent) as folder:
        base, adapter = Path(folder) / "base", Path(folder) / "adapter"
        made = make_model(base, args)
        if args.lora_rank:
            make_adapter(adapter, base, args.lora_rank)
        runs = [run_apart(base, Path(folder) / "export", args, False) for _ in range(args.repeat)]
        if args.reload:
            runs.append(run_apart(base, Path(folder) / "export", args, True))
    result = {"arguments": vars(args), "model": made, "machine": machine(), "runs": runs}
    print_table(result)
    if args.out:
        target = Path(args.out)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(partial, target)
    return 1 if any("failed" in run for run in runs) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gib", type=float, default=1.0, help="BF16 bytes of the model")
    parser.add_argument("--shape", choices=["auto", *SHAPES], default="auto",
                        help="auto: llama3-8b from 6 GiB on, llama3-1b below")  # fmt: skip
    parser.add_argument("--shards", type=int, help="files of the source (4, or 2 GiB each)")
    parser.add_argument("--format", default="fp8_block")
    parser.add_argument("--max-shard-size", default="1GiB", help="of the export")
    parser.add_argument("--lora-rank", type=int, default=0, help="merge an adapter of this rank")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--repeat", type=int, default=2, help="exports; the fastest counts")
    parser.add_argument("--reload", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dir", help="where the model and the export lie for as long as it lasts")
    parser.add_argument("--out", help="write results as JSON")
    parser.add_argument("--worker", nargs=2, metavar=("BASE", "EXPORT"), help=argparse.SUPPRESS)
    parser.add_argument("--verify", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Write the model; its facts."""
    import torch
    from safetensors.torch import save_file

    large = args.size_gib >= 6
    shape = ("llama3-8b" if large else "llama3-1b") if args.shape == "auto" else args.shape
    config = SHAPES[shape]
    outer, inner = outer_shapes(config), layer_shapes(config)
    per_layer = 2 * sum(a * b for a, b in inner.values())
    rest = args.size_gib * GIB - 2 * sum(a * b for a, b in outer.values())
    layers = max(1, round(rest / per_layer))
    names = {f"model.layers.{n}.{k}": v for n in range(layers) for k, v in inner.items()}
    shapes = {**outer, **names}
    total = 2 * sum(a * b for a, b in shapes.values())
    count = args.shards or max(4, round(total / (2 * GIB)))
    directory.mkdir(parents=True)
    pool = torch.randn(1 << 25, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weight_map: dict[str, str] = {}
    shard: dict[str, Any] = {}
    filled, number = 0, 1
    for index, (name, (rows, columns)) in enumerate(shapes.items()):
        tensor = drawn(pool, rows, columns, index)
        if name.endswith("norm.weight"):
            tensor = torch.ones(rows, dtype=torch.bfloat16)
        shard[name] = tensor
        filled += tensor.numel() * 2
        if filled >= total * number / count or index == len(shapes) - 1:
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            save_file(shard, str(directory / file), metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard, number = {}, number + 1
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index_text)
    config = {**config, "num_hidden_layers": layers, "max_position_embeddings": 8192,
              "hidden_act": "silu", "rms_norm_eps": 1e-5, "dtype": "bfloat16",
              "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return {"shape": shape, "layers": layers, "bytes": total, "shards": number - 1}


def outer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden, 1)}
    return shapes if config["tie_word_embeddings"] else {
        **shapes, "lm_head.weight": (vocabulary, hidden)
    }  # fmt: skip


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "input_layernorm.weight": (hidden, 1),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden, 1),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config["model_type"] == "qwen2":
        biases = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        shapes |= {f"self_attn.{name}.bias": (size, 1) for name, size in biases.items()}
    return shapes


def drawn(pool: Any, rows: int, columns: int, seed: int) -> Any:
    """A [rows, columns] tensor (a vector where there is one column) from a pool of Gaussians."""
    import torch

    count = rows * columns
    start = seed * 7919 % pool.numel()
    wanted = start + count
    flat = pool.repeat(-(-wanted // pool.numel()))[start:wanted] if wanted > pool.numel() else (
        pool[start:wanted]
    )  # fmt: skip
    flat = flat.clone() if flat.data_ptr() == pool.data_ptr() + 2 * start else flat
    return flat.contiguous() if columns == 1 else torch.reshape(flat, (rows, columns))


def make_adapter(directory: Path, base: Path, rank: int) -> None:
    """A LoRA adapter on every linear of the layers."""
    import torch
    from safetensors.torch import save_file

    from swiftfp8.export.checkpoint_io import CheckpointReader

    tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, spec in CheckpointReader(base).specs.items():
        if "_proj.weight" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = spec.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 1e-3
    directory.mkdir()
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def run_apart(base: Path, export: Path, args: argparse.Namespace, verify: bool) -> dict[str, Any]:
    """One export in a process of its own; its last line of output is its result."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(base), str(export)]
    command += ["--verify"] if verify else []
    load = os.getloadavg()[0]
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    shutil.rmtree(export, ignore_errors=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        print(done.stderr[-3000:], file=sys.stderr)
        tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"reload": verify, "failed": tail[:300], "load_before": load}
    result: dict[str, Any] = json.loads(lines[-1])
    return result | {"load_before": load}


def worker(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from swiftfp8.config.schema import ExportConfig
    from swiftfp8.export.export import ExportContext, export_checkpoint

    if args.threads:
        torch.set_num_threads(args.threads)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.zeros(1, device="cuda")  # starting CUDA is not part of an export's speed
    base, export = map(Path, args.worker)
    adapter = base.parent / "adapter"
    settings = ExportConfig(
        format=args.format, max_shard_size=args.max_shard_size, verify=args.verify
    )
    kind = json.loads((base / "config.json").read_text())["model_type"]
    for module in ("auto.modeling_auto", f"{kind}.modeling_{kind}"):  # nor is importing code
        importlib.import_module(f"transformers.models.{module}")
    before, used = peak(), cpu_seconds()
    began = time.perf_counter()
    report = export_checkpoint(
        base,
        adapter if adapter.is_dir() else None,
        export,
        settings,
        ExportContext(device=device, console=Console(file=sys.stderr)),
    )
    seconds, used = time.perf_counter() - began, cpu_seconds() - used
    largest = max(f.stat().st_size for d in (base, export) for f in d.glob("*.safetensors"))
    stages = dict(getattr(report, "stages", {}))
    print(
        json.dumps(
            {
                "reload": args.verify,
                "seconds": seconds,
                "cpu_seconds": used,
                "mib_per_s": report.source_bytes / MIB / seconds,
                "stages": stages,
                "peak_bytes": peak(),
                "peak_before": before,
                "allowed_bytes": 2 * largest + ALLOWED,
                "source_bytes": report.source_bytes,
                "export_bytes": report.export_bytes,
                "device": device,
                "threads": torch.get_num_threads(),
            }
        )
    )
    return 0


def peak() -> int:
    """Largest resident memory of this process until now, in bytes.

    Not getrusage's: that one begins with what the process that started this one had.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def cpu_seconds() -> float:
    """Processor seconds of this process, all threads: what other programs' load hardly changes."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), "unknown",
    )  # fmt: skip
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "gpu": gpu,
            "torch": torch.__version__}  # fmt: skip


def print_table(result: dict[str, Any]) -> None:
    made, host = result["model"], result["machine"]
    print(f"{made['shape']}, {made['layers']} layers, {made['bytes'] / GIB:.2f} GiB in "
          f"{made['shards']} shards; {host['cores']} cores {host['cpu']}, GPU {host['gpu']}, "
          f"torch {host['torch']}")  # fmt: skip
    print(f"{'':8s} {'MiB/s':>7s} {'seconds':>8s} {'CPU s':>6s} {'peak GiB':>9s} {'allowed':>8s} "
          f"{'load':>5s}  stages, s")  # fmt: skip
    fast = [run for run in result["runs"] if "failed" not in run and not run["reload"]]
    best = max(fast, key=lambda run: run["mib_per_s"], default=None)
    for run in result["runs"]:
        if "failed" in run:
            print(f"failed: {run['failed']}")
            continue
        label = "reload" if run["reload"] else ("best" if run is best else "")
        stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in run["stages"].items())
        print(f"{label:8s} {run['mib_per_s']:7.0f} {run['seconds']:8.1f} {run['cpu_seconds']:6.1f} "
              f"{run['peak_bytes'] / GIB:9.2f} {run['allowed_bytes'] / GIB:8.2f} "
              f"{run['load_before']:5.1f}  {stages}")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
"""LoRA training steps of swiftfp8's engine beside its peers: the same model, data, batch and GPU.

    python scripts/bench/bench_lora.py                                   # 7b, 4 x 2048, every stack
    python scripts/bench/bench_lora.py --shape 0.5b --batch 4 --length 1024 --stacks ours,best_bf16
    python scripts/bench/bench_lora.py --checkpointing --out results.json
    python scripts/bench/bench_lora.py --suite --out results.json        # every row of the docs

Each stack runs in a process of its own: Qwen2.5's shapes with random weights, LoRA on all linears,
AdamW on the adapters, SDPA attention, bf16 autocast as in transformers.Trainer. A stack that can't
run here is skipped with its reason. `ratio` is a stack's speed over the first BF16 stack's.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int | bool]] = {
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
STACKS = {
    "hf_bf16": "transformers + PEFT, BF16, eager",
    "best_bf16": "BF16 + torch.compile per layer + Liger fused cross entropy",
    "te_peft": "te.Linear (current scaling) as PEFT's base + Liger fused cross entropy",
    "torchao": "torchao float8 (tensorwise) as PEFT's base + compile + Liger fused cross entropy",
    "ours": "swiftfp8, torch backend, fused layers",
    "ours_fp8_head": "the same with an FP8 head",
    "ours_te": "swiftfp8, te backend (one FP8 copy), fused loss",
}
# Dense BF16 TFLOP/s by the vendor's datasheet, for MFU.
PEAKS = {"H100": 989e12, "H200": 989e12, "L40S": 362e12, "RTX 4090": 165e12, "B200": 2250e12}


class Skipped(Exception):
    """A stack that can't run on this machine."""


# The rows of docs/benchmarks.md: arguments of one table each.
SUITE = (
    "--shape 7b --stacks hf_bf16,best_bf16,ours,ours_fp8_head,te_peft,torchao,ours_te",
    "--shape 7b --checkpointing --stacks best_bf16,ours",
    "--shape 7b --batch 1 --length 8192 --stacks best_bf16,ours",
    "--shape 7b --batch {largest} --stacks ours",
    "--shape 0.5b --length 1024 --stacks best_bf16,ours",
    "--shape 1.5b --full --stacks hf_bf16,ours,ours_te",
)
# 2.5 times the batch that transformers + PEFT fits into 80 GiB, and more.
LARGEST_BATCH = 15
OTHER_FP8 = ("te_peft", "torchao", "ours_te")
# Processes that import their libraries while others measure.
AHEAD = 2


def main() -> int:
    args = parse()
    if args.worker:
        return worker(args)
    common = [part for part in sys.argv[1:] if part != "--suite"]
    lines = SUITE if args.suite else ("",)
    tables = [common + line.format(largest=LARGEST_BATCH).split() for line in lines]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.gpus + AHEAD) as pool:
        lock = Path(folder) / "gpu"
        rows = [(line, stack) for line in tables for stack in parse(line).stacks.split(",")]
        # Other FP8 stacks last: the rows above are what ours are measured by.
        order = sorted(rows, key=lambda row: row[1] in OTHER_FP8)
        jobs = {
            (*line, stack): pool.submit(run_apart, stack, line, parse(line), lock)
            for line, stack in order
        }
        done = []
        for line in tables:
            own = parse(line)
            results = [jobs[*line, stack].result() for stack in own.stacks.split(",")]
            add_ratios(results)
            print_table(results, own)
            done.append({"arguments": vars(own), "results": results})
    if args.out:
        target = Path(args.out)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps({"host": host(), "tables": done}, indent=1))
        os.replace(partial, target)
    return 0


def add_ratios(results: list[dict[str, Any]]) -> None:
    base = next((r for r in results if "bf16" in r["stack"] and "tokens_per_s" in r), None)
    for result in results:
        if base and "tokens_per_s" in result:
            result["ratio"] = result["tokens_per_s"] / base["tokens_per_s"]
            result["memory_ratio"] = result["peak_gib"] / base["peak_gib"]


def host() -> dict[str, str]:
    """GPU and versions."""
    import torch

    names = ("torch", "triton", "transformers", "peft", "liger-kernel", "transformer-engine",
             "torchao", "swiftfp8")  # fmt: skip
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return versions | {"gpu": gpu, "cuda": str(torch.version.cuda)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--suite", action="store_true", help="every row of docs/benchmarks.md")
    parser.add_argument("--full", action="store_true", help="train every weight instead of LoRA")
    parser.add_argument("--checkpointing", action="store_true", help="full activation recompute")
    parser.add_argument("--no-graphs", action="store_true", help="ours: without CUDA graphs")
    parser.add_argument("--stacks", default="hf_bf16,best_bf16,te_peft,torchao,ours")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="measured; the median counts")
    parser.add_argument("--recompute", choices=("none", "cheap"), default="none")
    parser.add_argument("--keep-bf16", action="store_true", help="ours: keep gate/up in BF16")
    parser.add_argument("--profile", help="write a kernel profile of one step to this file")
    parser.add_argument("--timeout", type=int, default=400, help="seconds a stack may take")
    parser.add_argument("--gpus", type=int, default=1, help="measure on so many at a time")
    parser.add_argument("--out", help="write results as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_apart(
    stack: str, arguments: list[str], args: argparse.Namespace, lock: Path
) -> dict[str, Any]:
    """One stack in a process of its own; its last line of output is its result."""
    command = [sys.executable, __file__, *arguments, "--worker", stack, "--lock", str(lock)]
    began = time.time()
    result: dict[str, Any] = {"stack": stack, "what": STACKS.get(stack, stack)}
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode == -signal.SIGALRM:
        result["skipped"] = f"took longer than {args.timeout} s"
    elif done.returncode == 0 and lines and lines[-1].startswith("{"):
        result |= json.loads(lines[-1])
    else:
        tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        result["skipped"] = f"failed: {tail[:300]}"
        print(done.stderr[-3000:], file=sys.stderr)
    result["process_s"] = round(time.time() - began, 1)
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def print_table(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    checkpointing = ", full checkpointing" if args.checkpointing else ""
    full = ", full fine-tuning" if args.full else ""
    print(f"{args.shape}, {args.batch} x {args.length}{checkpointing}{full}, {gpu}, "
          f"torch {torch.__version__}")  # fmt: skip
    print(f"{'stack':16s} {'tok/s':>8s} {'ms':>8s} {'peak GiB':>9s} {'static':>7s} "
          f"{'MFU':>6s} {'ratio':>6s} {'memory':>7s}")  # fmt: skip
    for r in results:
        if "skipped" in r:
            print(f"{r['stack']:16s} skipped: {r['skipped']}")
            continue
        mfu = f"{r['mfu']:.1%}" if r.get("mfu") else "-"
        print(f"{r['stack']:16s} {r['tokens_per_s']:8.0f} {r['ms']:8.1f} {r['peak_gib']:9.1f} "
              f"{r['static_gib']:7.1f} {mfu:>6s} {r.get('ratio', 0):6.2f} "
              f"{r.get('memory_ratio', 0):7.2f}")  # fmt: skip


def worker(args: argparse.Namespace) -> int:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    host = HostTime(args.lock)
    host.share()
    import peft  # noqa: F401
    import torch
    import transformers  # noqa: F401

    host.release()
    lock = take_gpu(args)  # held to the end  # noqa: F841
    host.share()
    signal.alarm(args.timeout)
    try:
        if not torch.cuda.is_available():
            raise Skipped("PyTorch sees no CUDA GPU")
        torch.manual_seed(0)
        model, context = BUILDERS[args.worker](args)
        host.take()
        result = measure(model, context, args)
    except Skipped as reason:
        result = {"skipped": str(reason)}
    except torch.cuda.OutOfMemoryError as error:
        result = {"skipped": f"out of memory: {str(error).splitlines()[0][:150]}"}
    print(json.dumps(result))
    return 0


class HostTime:
    """The host's processors: shared by what imports and compiles, alone for what is measured."""

    def __init__(self, lock: str | None) -> None:
        self.file = open(f"{lock}host" if lock else os.devnull, "a")  # noqa: SIM115

    def share(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_SH)

    def release(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def take(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_EX)


def take_gpu(args: argparse.Namespace) -> Any:
    """Wait for a GPU: one process at a time on each, the others import libraries meanwhile."""
    while args.lock:
        for gpu in range(args.gpus):
            lock = open(f"{args.lock}{gpu}", "a")  # noqa: SIM115
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            if args.gpus > 1:
                os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            return lock
        time.sleep(0.05)
    return None


def measure(model: Any, context: Callable[[], Any], args: argparse.Namespace) -> dict[str, Any]:
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    if args.full and args.worker.startswith("ours"):
        from swiftfp8.train.masters import MasterAdamW

        # Exact FP32 masters; the peers' AdamW rounds its updates, and its moments, to BF16.
        optimizer = MasterAdamW(trained, lr=1e-5, state_dtype="bf16", fused=True)
    else:
        optimizer = torch.optim.AdamW(trained, lr=1e-5 if args.full else 1e-4, fused=True)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    ids = torch.randint(0, vocabulary, (args.batch, args.length), device="cuda")
    model.train()

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16), context():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    torch.cuda.empty_cache()
    static = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.warmup):
        step()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)]
    began = time.perf_counter()
    marks[0].record()
    for mark in marks[1:]:
        loss = step()
        mark.record()
    issued = time.perf_counter() - began
    torch.cuda.synchronize()
    took = [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]
    seconds = statistics.median(took)
    tokens = args.batch * args.length
    peak_flops = next((v for k, v in PEAKS.items() if k in torch.cuda.get_device_name()), None)
    if args.profile:
        write_profile(step, args.profile)
    flops = step_flops(args)
    return {
        "tokens_per_s": tokens / seconds,
        "ms": seconds * 1e3,
        "slowest_ms": max(took) * 1e3,
        "host_ms": issued / args.steps * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "static_gib": static / 2**30,
        "mfu": flops / seconds / peak_flops if peak_flops else None,
        "loss": loss.item(),
    }


def step_flops(args: argparse.Namespace) -> float:
    """4 a frozen weight and token, 6 a trained one; attention causal, its backward pass 2.5x."""
    shape = SHAPES[args.shape]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * inner
    weights = layer * shape["num_hidden_layers"] + hidden * shape["vocab_size"]
    tokens = args.batch * args.length
    attention = 3.5 * 2 * tokens * args.length * hidden * shape["num_hidden_layers"]
    return (6.0 if args.full else 4.0) * weights * tokens + attention


def write_profile(step: Callable[[], Any], target: str) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    rows = [
        f"{e.self_device_time_total / 1e3:9.2f} ms x{e.count:5d}  {e.key[:140]}"
        for e in events[:60]
    ]
    total = sum(e.self_device_time_total for e in events) / 1e3
    Path(target).write_text("\n".join([f"{total:9.2f} ms in kernels", *rows]) + "\n")


def base_model(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(**SHAPES[args.shape], max_position_embeddings=32768, rope_theta=1e6)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    return model.requires_grad_(False)


def linear_names(model: Any) -> list[str]:
    import torch

    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]


def with_peft(model: Any, args: argparse.Namespace) -> Any:
    from peft import LoraConfig, get_peft_model

    parts = sorted({name.rpartition(".")[2] for name in linear_names(model)})
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=parts)
    return get_peft_model(model, config)


def checkpointed(model: Any, args: argparse.Namespace) -> None:
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def build_hf_bf16(args: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    model = base_model(args)
    checkpointed(model, args)
    return (model.requires_grad_() if args.full else with_peft(model, args)), nothing


def with_liger_loss() -> None:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2
    except ImportError as error:
        raise Skipped(f"liger-kernel can't be imported: {error}") from error
    apply_liger_kernel_to_qwen2(
        rope=False, rms_norm=False, swiglu=False, cross_entropy=False,
        fused_linear_cross_entropy=True,
    )  # fmt: skip


def compile_layers(model: Any) -> None:
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in causal.model.layers:
        layer.compile()


def build_best_bf16(args: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    with_liger_loss()
    model, context = build_hf_bf16(args)
    compile_layers(model)
    return model, context


def build_te_peft(args: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    import torch

    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling
    except (ImportError, OSError, RuntimeError) as error:
        raise Skipped(f"Transformer Engine can't be imported: {error}") from error
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.layer import Linear as PeftLinear

    class PeftTe(PeftLinear):
        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            return module.in_features, module.out_features

    with_liger_loss()
    model = base_model(args)
    names = linear_names(model)
    recipe = Float8CurrentScaling()
    with torch.no_grad():
        for name in names:
            parent, _, child = name.rpartition(".")
            old = getattr(model.get_submodule(parent), child)
            with te.quantized_model_init(enabled=True, recipe=recipe):
                new = te.Linear(
                    old.in_features, old.out_features, bias=old.bias is not None,
                    params_dtype=torch.bfloat16, device="cuda",
                )  # fmt: skip
            new.weight.copy_(old.weight)
            if old.bias is not None:
                new.bias.copy_(old.bias)
            setattr(model.get_submodule(parent), child, new.requires_grad_(False))
            del old
    if args.checkpointing:
        import functools

        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = functools.partial(
                    te.checkpoint, use_reentrant=False
                )
    parts = sorted({name.rpartition(".")[2] for name in names})
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=parts)
    config._register_custom_module({te.Linear: PeftTe})
    return get_peft_model(model, config), lambda: te.autocast(enabled=True, recipe=recipe)


def build_torchao(args: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise Skipped(f"torchao can't be imported: {error}") from error
    with_liger_loss()
    model = base_model(args)
    checkpointed(model, args)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(),
        module_filter_fn=lambda module, name: "lm_head" not in name,
    )
    model = with_peft(model.requires_grad_(False), args)
    compile_layers(model)
    return model, nothing


def build_ours(args: argparse.Namespace, head: str = "bf16") -> tuple[Any, Callable[[], Any]]:
    from swiftfp8.precision import torch_native
    from swiftfp8.train.losses import fuse_loss

    model, names = converted_model(args, torch_native)
    checkpointed(model, args)
    if args.full:
        torch_native.compile_layers(model.requires_grad_(), swiglu=True)
        if reason := fuse_loss(model):
            raise Skipped(reason)
        return model, nothing
    if head == "fp8":
        convert(model, "lm_head", torch_native, args, lora=False)
    model = with_our_lora(model, names, args)
    found = torch_native.fuse_model(
        model,
        recompute=args.recompute,
        keep_gate_up_fp8=not args.keep_bf16,
        graphs=not args.no_graphs,
    )
    problems = {reason for reason in found.values() if reason} | {fuse_loss(model)}
    if problems != {None}:
        raise Skipped(f"not fused: {problems}")
    return model, nothing


def build_ours_te(args: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    from swiftfp8.plan import RecipeOptions
    from swiftfp8.precision import te
    from swiftfp8.train.losses import fuse_loss

    model, names = converted_model(args, te)
    model = model.requires_grad_() if args.full else with_our_lora(model, names, args)
    if reason := fuse_loss(model):
        raise Skipped(reason)
    return model, lambda: te.context(RecipeOptions(recipe="fp8_current"))


def converted_model(args: argparse.Namespace, backend: Any) -> tuple[Any, list[str]]:
    """The model with every linear but the head in one of our backends, and their names."""
    reason = backend.available()
    if reason is not None:
        raise Skipped(reason)
    model = base_model(args)
    names = linear_names(model)
    for name in names:
        convert(model, name, backend, args, lora=not args.full)
    return model, names


def convert(model: Any, name: str, backend: Any, args: argparse.Namespace, *, lora: bool) -> None:
    """Put one linear of the model into one of our backends."""
    from swiftfp8.plan import LayerPlan, RecipeOptions

    parent, _, child = name.rpartition(".")
    linear = getattr(model.get_submodule(parent), child)
    plan = LayerPlan(
        name=name, in_features=linear.in_features, out_features=linear.out_features,
        bias=linear.bias is not None, precision="fp8_current", reason="benchmark",
        lora=lora, trainable=args.full,
    )  # fmt: skip
    converted = backend.convert(linear, plan, RecipeOptions(recipe="fp8_current"))
    setattr(model.get_submodule(parent), child, converted)


def with_our_lora(model: Any, names: list[str], args: argparse.Namespace) -> Any:
    from swiftfp8.adapters.lora import add_adapter
    from swiftfp8.plan import LoraPlan

    lora = LoraPlan(
        rank=args.rank, alpha=2.0 * args.rank, dropout=0.0, use_rslora=False, targets=tuple(names)
    )
    return add_adapter(model, lora)


BUILDERS: dict[str, Callable[[argparse.Namespace], tuple[Any, Callable[[], Any]]]] = {
    "hf_bf16": build_hf_bf16,
    "best_bf16": build_best_bf16,
    "te_peft": build_te_peft,
    "torchao": build_torchao,
    "ours": build_ours,
    "ours_fp8_head": lambda args: build_ours(args, head="fp8"),
    "ours_te": build_ours_te,
}

if __name__ == "__main__":
    sys.exit(main())

"""What the machine can do, as plain values: probed here, or given by hand for "what if".

Every precision has either None (it works) or the reason why it does not; the plan quotes the
reason. This file and `precision/te.py` are the only ones that import Transformer Engine.

The rules, by CUDA compute capability: FP16 everywhere, BF16 from 8.0 (Ampere), per-tensor FP8 from
8.9 (Ada), FP8 block scaling natively on 9.x only (Hopper), MXFP8 from 10.0 (Blackwell).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.registry import unknown

GIB = 1024**3
PER_TENSOR = ("fp8_current", "fp8_delayed")
ALL_FP8 = ("mxfp8", "fp8_block", *PER_TENSOR)
TORCH_RECIPES = ("fp8_current",)

# name: (marketing name, compute capability, GiB that torch reports of one device)
PRESETS: dict[str, tuple[str, tuple[int, int], float]] = {
    "a100": ("NVIDIA A100", (8, 0), 79.0),
    "b200": ("NVIDIA B200", (10, 0), 178.0),
    "h100": ("NVIDIA H100", (9, 0), 79.0),
    "h200": ("NVIDIA H200", (9, 0), 139.0),
    "l4": ("NVIDIA L4", (8, 9), 22.0),
    "l40s": ("NVIDIA L40S", (8, 9), 44.5),
    "rtx3090": ("NVIDIA RTX 3090", (8, 6), 23.5),
    "rtx4090": ("NVIDIA RTX 4090", (8, 9), 23.5),
    "rtx5090": ("NVIDIA RTX 5090", (12, 0), 31.5),
    "t4": ("NVIDIA T4", (7, 5), 14.5),
    "v100": ("NVIDIA V100", (7, 0), 31.5),
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device, how many of it there are, and what runs on it.

    `sm` is the CUDA compute capability as (major, minor), None on a CPU. `memory_gib` is one
    device's memory. `unavailable` maps a precision ("mxfp8", "fp8_block", "fp8_current",
    "fp8_delayed", "bf16", "fp16", "fp32") to the reason why the device can't do it;
    `te_unavailable` likewise for what the device could do and Transformer Engine can't. A precision
    in neither works. `probed` is False for hardware given by hand, where Transformer Engine is
    taken as installed. `torch_reason` is why the `torch` backend can't run what the device could.
    `cuda_version` is the one that torch was built for.
    """

    name: str
    device: str  # "cuda" or "cpu"
    sm: tuple[int, int] | None
    memory_gib: float
    count: int = 1
    unavailable: dict[str, str]
    te_unavailable: dict[str, str] = field(default_factory=dict)
    te_version: str | None = None
    te_reason: str | None = None
    torch_reason: str | None = None
    cuda_version: str | None = None
    probed: bool = True

    def why_not(self, precision: str) -> str | None:
        """The reason why `precision` can't run here, or None where it can."""
        return self.unavailable.get(precision) or self.te_unavailable.get(precision)

    def why_not_torch(self, precision: str) -> str | None:
        """The same for the `torch` backend, which needs no Transformer Engine."""
        if precision in self.unavailable:
            return self.unavailable[precision]
        if precision not in TORCH_RECIPES:
            return f"the torch backend runs {', '.join(TORCH_RECIPES)} only"
        return self.torch_reason


def probe() -> Hardware:
    """Look at this machine: its first CUDA device, or its CPU where there is none."""
    import torch

    if not torch.cuda.is_available():
        return _this_cpu(_no_cuda_reason(torch.version.cuda), cuda_version=torch.version.cuda)
    index = torch.cuda.current_device()
    name = torch.cuda.get_device_name(index)
    memory = torch.cuda.get_device_properties(index).total_memory / GIB
    if torch.version.hip is not None:
        return _rocm(name, memory, torch.cuda.device_count())
    sm = torch.cuda.get_device_capability(index)
    te_version, te_reason, te_unavailable = _probe_te(torch.version.cuda)
    device_reasons = _device_reasons(name, sm)
    return Hardware(
        name=name,
        device="cuda",
        sm=sm,
        memory_gib=memory,
        count=torch.cuda.device_count(),
        unavailable=device_reasons,
        te_unavailable={k: v for k, v in te_unavailable.items() if k not in device_reasons},
        te_version=te_version,
        te_reason=te_reason,
        torch_reason=_probe_torch_engine(),
        cuda_version=torch.version.cuda,
    )


def parse_hardware(text: str) -> Hardware:
    """Hardware from a preset's name, `cpu` (this machine's), or `<name>:<sm>:<GiB>`.

    `sm` is written 8.9 or 89. Transformer Engine is taken as installed.

    Raises:
        SwiftFP8Error: for an unknown name or a malformed triple.
    """
    wanted = text.strip().lower()
    if ":" in wanted:
        return _given(*_parse_triple(text))
    if wanted == "cpu":
        return _this_cpu("hardware=cpu has no GPU", probed=False)
    key = re.sub(r"[\s_-]|nvidia|geforce", "", wanted)
    if key not in PRESETS:
        raise _unknown_hardware(text, key)
    return _given(*PRESETS[key])


def install_hint(cuda_version: str | None, *, checkout: bool = False) -> str:
    """The command that installs Transformer Engine for the CUDA that torch was built for.

    `checkout`: the one for a checkout of the source.
    """
    major = (cuda_version or "13").split(".")[0]
    package = "-e '." if checkout else "'swiftfp8"
    return f"pip install --no-build-isolation {package}[te-cu{major}]'"


def sm_text(sm: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it: 8.9."""
    return f"{sm[0]}.{sm[1]}"


def _given(name: str, sm: tuple[int, int], memory_gib: float) -> Hardware:
    reasons = _device_reasons(name, sm)
    te_reasons = {}
    if sm >= (12, 0):
        te_reasons["mxfp8"] = (
            f"Transformer Engine has MXFP8 on 10.x only so far, and {name} has compute capability "
            f"{sm_text(sm)}"
        )
    return Hardware(
        name=name,
        device="cuda",
        sm=sm,
        memory_gib=memory_gib,
        unavailable=reasons,
        te_unavailable=te_reasons,
        te_version="assumed installed",
        probed=False,
    )


def _device_reasons(name: str, sm: tuple[int, int]) -> dict[str, str]:
    """What the silicon can't do, each with its reason."""
    has = f"{name} has compute capability {sm_text(sm)}"
    reasons: dict[str, str] = {}
    if sm < (8, 0):
        reasons["bf16"] = f"{has}; BF16 needs 8.0 or newer (Ampere)"
    if sm < (8, 9):
        fp8 = f"{has}; FP8 matmuls need 8.9 or newer (Ada, Hopper, Blackwell)"
        return reasons | dict.fromkeys(ALL_FP8, fp8)
    if sm < (10, 0):
        reasons["mxfp8"] = f"{has}; MXFP8 needs 10.0 or newer (Blackwell)"
    if sm[0] != 9:
        instead = "has no such matmul" if sm < (9, 0) else "has MXFP8 in its place"
        reasons["fp8_block"] = (
            f"{has}; FP8 block scaling runs natively on 9.0 (Hopper) only, this one {instead}"
        )
    return reasons


def _parse_triple(text: str) -> tuple[str, tuple[int, int], float]:
    """Read `<name>:<sm>:<GiB>`."""
    match = re.fullmatch(r"([^:]+):(\d+)(?:\.(\d))?:(\d+(?:\.\d+)?)", text.strip())
    problem = SwiftFP8Error(
        f"can't read hardware '{text}'",
        where="hardware",
        fix="write <name>:<compute capability>:<GiB>, as in mygpu:8.9:24",
    )
    if match is None or float(match[4]) <= 0:
        raise problem
    name, major, minor, memory = match[1], int(match[2]), match[3], float(match[4])
    if minor is not None:
        sm = (major, int(minor))
    elif major <= 12:  # "9" and "10" are majors: no device below 3.0 is left
        sm = (major, 0)
    else:
        sm = divmod(major, 10)
    if not (3, 0) <= sm < (20, 0):
        raise problem
    return name, sm, memory


def _unknown_hardware(text: str, key: str) -> SwiftFP8Error:
    error = unknown("hardware", key or text, [*PRESETS, "cpu"], where="hardware")
    fix = f"{error.fix} Any other GPU: <name>:<compute capability>:<GiB>, as in mygpu:8.9:24"
    return SwiftFP8Error(f"unknown hardware '{text}'", where="hardware", fix=fix)


def _probe_te(cuda: str | None) -> tuple[str | None, str | None, dict[str, str]]:
    """Transformer Engine's version, why it does not load, and why a recipe does not run.

    Importing it raises RuntimeError where there is no driver, OSError where a library is missing,
    AssertionError where its packages' versions disagree.
    """
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        reason = (
            "Transformer Engine is not installed"
            if missing == "transformer_engine"
            else f"Transformer Engine does not load: {_first_line(error)}"
        )
        return None, reason, _all_fp8(f"{reason} ({install_hint(cuda)})")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = f"Transformer Engine does not load: {_first_line(error)}"
        return None, reason, _all_fp8(f"{reason} (see swiftfp8 doctor)")
    return str(transformer_engine.__version__), None, _te_recipe_reasons(te)


def _te_recipe_reasons(te: object) -> dict[str, str]:
    """Transformer Engine's own answer for each recipe it can't run here."""
    checks = {
        "is_fp8_available": PER_TENSOR,
        "is_fp8_block_scaling_available": ("fp8_block",),
        "is_mxfp8_available": ("mxfp8",),
    }
    reasons: dict[str, str] = {}
    for function, recipes in checks.items():
        check = getattr(te, function, None)
        if check is None:
            reasons |= dict.fromkeys(recipes, "this version of Transformer Engine is too old")
            continue
        available, reason = check(return_reason=True)
        if not available:
            reasons |= dict.fromkeys(recipes, f"Transformer Engine: {str(reason).rstrip('.')}")
    return reasons


def _probe_torch_engine() -> str | None:
    """Why PyTorch alone can't run FP8 on a GPU that could, or None where it can."""
    import torch

    if not hasattr(torch, "_scaled_mm"):
        return f"PyTorch {torch.__version__} has no scaled matmul"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def _all_fp8(reason: str) -> dict[str, str]:
    return dict.fromkeys(ALL_FP8, reason)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _no_cuda_reason(torch_cuda: str | None) -> str:
    if Path("/proc/driver/nvidia/version").exists() and torch_cuda is None:
        return "there is an NVIDIA GPU, but this torch is built for the CPU only"
    if torch_cuda is not None:
        return f"torch (CUDA {torch_cuda}) finds no usable NVIDIA GPU"
    return "there is no NVIDIA GPU"


def _rocm(name: str, memory_gib: float, count: int) -> Hardware:
    """An AMD GPU: its "capability" is no CUDA one, and Transformer Engine here means NVIDIA's."""
    return Hardware(
        name=name,
        device="cuda",
        sm=None,
        memory_gib=memory_gib,
        count=count,
        unavailable=_all_fp8(f"{name} is an AMD GPU; FP8 here needs an NVIDIA one"),
    )


def _this_cpu(no_gpu: str, *, probed: bool = True, cuda_version: str | None = None) -> Hardware:
    """This machine without a GPU. BF16 only where the processor multiplies it natively."""
    fp8 = f"{no_gpu}; FP8 matmuls need compute capability 8.9 or newer (Ada, Hopper, Blackwell)"
    reasons = _all_fp8(fp8)
    reasons["fp16"] = "FP16 on a CPU is slow and has no loss scaler"
    if not _cpu_has_bf16(_cpu_flags()):
        reasons["bf16"] = "this CPU has no native BF16 (AVX512-BF16, AMX or Arm BF16)"
    return Hardware(
        name=_cpu_name(),
        device="cpu",
        sm=None,
        memory_gib=_ram_gib(),
        unavailable=reasons,
        cuda_version=cuda_version,
        probed=probed,
    )


def _cpu_flags() -> frozenset[str]:
    """Instruction-set flags from /proc/cpuinfo; empty where there is none (not Linux)."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", path.read_text(), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _cpu_has_bf16(flags: frozenset[str]) -> bool:
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"CPU ({(match[1] if match else platform.machine()).strip()})"


def _ram_gib() -> float:
    """Memory that this process may use: the machine's, or its container's limit."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = Path(path)
        if limit.exists() and (text := limit.read_text().strip()).isdigit():
            total = min(total, float(text))
    return total / GIB

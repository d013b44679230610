"""Is this machine ready for FP8, and if not, what is missing?

One screen: the GPU, the driver, CUDA, torch, Transformer Engine, every precision with the reason
where it can't be had, the packages, and the one command that would help.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swiftfp8 import __version__, engine
from swiftfp8.hardware import ALL_FP8, Hardware, install_hint, probe, sm_text

READY = 0
NOT_READY = 3
PRECISIONS = (*ALL_FP8, "bf16", "fp16", "fp32")
PACKAGES = (
    "swiftfp8",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "safetensors",
    "transformer-engine",
    "liger-kernel",
    "trl",
)


def doctor(console: Console) -> int:
    """Print the machine's state; return 0 where FP8 is ready to train, 3 where it is not."""
    return report(console, probe())


def report(console: Console, hardware: Hardware) -> int:
    """Print what `hardware` can do; return `doctor`'s exit code."""
    ready = is_ready(hardware)
    console.print(_machine(hardware))
    console.print()
    console.print(_precisions(hardware))
    console.print()
    console.print(_packages())
    console.print()
    if ready:
        console.print(Text("FP8 is ready.", style="bold green"))
        return READY
    console.print(Text("FP8 is not ready.", style="bold yellow"))
    for line in advice(hardware, driver=nvidia_driver()):
        console.print(Text(f"  {line}"))
    return NOT_READY


def is_ready(hardware: Hardware) -> bool:
    """Whether `precision.backend=auto` has an engine that runs FP8 here."""
    if any(hardware.why_not(recipe) is None for recipe in ALL_FP8):
        return True
    return "torch" in engine.AUTO_ENGINES and _why_no_torch(hardware) is None


def advice(hardware: Hardware, *, driver: str | None) -> list[str]:
    """What to do, in order, so that FP8 becomes ready."""
    alone = "Or set precision.backend=torch, which needs no Transformer Engine."
    return _advice(hardware, driver) + ([alone] if _why_no_torch(hardware) is None else [])


def _advice(hardware: Hardware, driver: str | None) -> list[str]:
    if "fp8_current" not in hardware.unavailable:
        if hardware.te_reason is not None and "not installed" not in hardware.te_reason:
            return [
                hardware.te_reason,
                f"It must fit torch's CUDA ({hardware.cuda_version}) and find its libraries; "
                f"install it again: {install_hint(hardware.cuda_version)}",
                _from_source(hardware),
            ]
        if hardware.te_version is not None:
            return [str(hardware.why_not("fp8_current"))]
        return [
            f"Install Transformer Engine: {install_hint(hardware.cuda_version)}",
            _from_source(hardware),
            "(the GPU can do FP8; a torch built for CUDA and a CUDA toolkit must be there first)",
        ]
    if hardware.device == "cpu" and driver is not None and hardware.probed:
        return [
            f"There is an NVIDIA driver ({driver}), but torch does not use it.",
            "Install a torch that is built for CUDA: https://pytorch.org/get-started/locally",
        ]
    return [
        "FP8 needs an NVIDIA GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell).",
        "Training works here without it: dtype=fp8 falls back, and says so.",
        "precision.emulate=true runs FP8's numerics on any device, without its speed.",
    ]


def _from_source(hardware: Hardware) -> str:
    return f"In a checkout of the source: {install_hint(hardware.cuda_version, checkout=True)}"


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        words = path.read_text().split()
        numbers = [word for word in words if word[:1].isdigit() and word.count(".") >= 1]
        if numbers:
            return numbers[0]
    return _driver_from_smi()


def _driver_from_smi() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def _machine(hardware: Hardware) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    many = f"{hardware.count} x " if hardware.count > 1 else ""
    table.add_row("device", Text(f"{many}{hardware.name}, {hardware.memory_gib:.1f} GiB"))
    if hardware.sm is not None:
        table.add_row("compute", f"capability {sm_text(hardware.sm)}")
    table.add_row("driver", nvidia_driver() or "no NVIDIA driver")
    table.add_row("CUDA", hardware.cuda_version or "torch is not built for CUDA")
    table.add_row("TE", Text(_te(hardware)))
    table.add_row("torch FP8", Text(_torch_engine(hardware)))
    table.add_row("Python", f"{platform.python_version()} on {platform.platform()}")
    return table


def _te(hardware: Hardware) -> str:
    if hardware.te_version is not None:
        return f"Transformer Engine {hardware.te_version}"
    return hardware.te_reason or "not looked for: no GPU for it"


def _torch_engine(hardware: Hardware) -> str:
    reason = _why_no_torch(hardware)
    return reason or "PyTorch and Triton alone run fp8_current (precision.backend=torch)"


def _why_no_torch(hardware: Hardware) -> str | None:
    return hardware.why_not_torch("fp8_current")


def _precisions(hardware: Hardware) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("precision", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("reason", overflow="fold")
    said: str | None = None
    for precision in PRECISIONS:
        reason = hardware.why_not(precision)
        mark = Text("yes", style="green") if reason is None else Text("no", style="yellow")
        table.add_row(precision, mark, Text('"' if reason and reason == said else reason or ""))
        said = reason
    return table


def _packages() -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("package", no_wrap=True)
    table.add_column("version", no_wrap=True)
    for name in PACKAGES:
        table.add_row(name, "-" if (found := _version(name)) is None else found)
    return table


def _version(name: str) -> str | None:
    if name == "swiftfp8":
        return __version__  # also where it runs from a checkout
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

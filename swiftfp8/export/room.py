"""Whether this machine's memory holds a model, for the checks that load one whole."""

from __future__ import annotations

from pathlib import Path

from swiftfp8.export.source import Source

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_FACTOR = 1.5  # a model being loaded: its weights, and those of some layers a second time
_BESIDE = 1 << 30  # torch, transformers, activations
_GIB = 2**30


def why_no_room(source: Source) -> str | None:
    """Why the model can't be loaded here, None where it can (or nobody knows)."""
    free = free_memory()
    needed = int(sum(spec.nbytes for spec in source.tensors.values()) * _FACTOR) + _BESIDE
    if free is None or needed <= free:
        return None
    return (
        f"loading it takes about {needed / _GIB:.1f} GiB of memory and {free / _GIB:.1f} GiB are "
        "free"
    )


def free_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that a process may still take: the machine's, and the container's where it has less."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    limit = cgroup / "memory.max"
    if limit.is_file() and limit.read_text().strip() != "max":
        held = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        files = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        found.append(int(limit.read_text()) - (held - files))  # cached files make room
    return min(found, default=None)

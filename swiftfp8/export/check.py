"""`swiftfp8 export verify`: what is wrong with a checkpoint, whoever wrote it.

Files and configuration are always checked. On request the checkpoint is also loaded by plain
transformers in a fresh process and compared, parameter by parameter and by its logits, with the
same files dequantized by swiftfp8: two readers that agree bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.export.formats import bf16
from swiftfp8.export.journal import JOURNAL_NAME
from swiftfp8.export.layout import Fault, FormatOptions
from swiftfp8.export.locate import require_checkpoint
from swiftfp8.export.reload import quantization_section
from swiftfp8.export.source import open_source
from swiftfp8.export.targets import engines_for, format_warnings, why_no_reload
from swiftfp8.export.verify import (
    ReloadCheck,
    format_of,
    reload_text,
    verify_directory,
    verify_reload,
)


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Faults and remarks about a directory, and what was checked of it."""

    directory: Path
    format: str
    faults: tuple[Fault, ...]
    checked: str
    notes: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing worse than a warning was found."""
        return not any(fault.severity == "error" for fault in self.faults)

    def __rich__(self) -> RenderableType:
        """The verdict, the faults, and what was looked at."""
        errors = sum(fault.severity == "error" for fault in self.faults)
        verdict = "sound" if self.sound else f"{errors} fault(s)"
        parts: list[RenderableType] = [Text(f"{self.directory}: {self.format}, {verdict}")]
        if self.faults:
            table = Table("", "where", "what", show_lines=False)
            for fault in sorted(self.faults, key=lambda fault: fault.severity):
                table.add_row(fault.severity, Text(fault.where), Text(fault.what))
            parts.append(table)
        parts.append(Text(f"checked: {self.checked}"))
        parts += [Text(f"note: {note}") for note in self.notes]
        return Group(*parts)


def check_checkpoint(
    directory: Path, *, reload: bool = False, trust_remote_code: bool = False
) -> CheckResult:
    """Find what is wrong with a checkpoint directory.

    Raises:
        SwiftFP8Error: no such directory, or one that swiftfp8 can't judge.
    """
    require_checkpoint(directory)
    name = format_of(directory)
    faults = verify_directory(directory, name, trust_remote_code=trust_remote_code)
    if (directory / JOURNAL_NAME).exists():
        what = "this export was interrupted and is not finished: export.resume=true goes on with it"
        faults.insert(0, Fault(where=JOURNAL_NAME, what=what))
    checked = "configuration, tensor headers, scales and bytes"
    if reload and any(fault.severity == "error" for fault in faults):
        checked += "; not reloaded, because of the faults"
    elif reload:
        obstacle = why_no_reload(name)
        if obstacle:
            checked += f"; not reloaded: {obstacle}"
        else:
            found = _reload(directory, trust_remote_code)
            if isinstance(found, Fault):
                faults.append(found)
            else:
                checked += f"; {reload_text(found, quantized=name != 'bf16')}"
    section = {} if name == "adapter" else quantization_section(directory)
    static = section.get("activation_scheme") == "static"
    loads = engines_for(name, static=static)
    return CheckResult(
        directory=directory,
        format=name,
        faults=tuple(faults),
        checked=checked,
        notes=(
            f"engines for this format: {', '.join(loads)}",
            *format_warnings(name, static=static),
        ),
    )


def _reload(directory: Path, trust_remote_code: bool) -> ReloadCheck | Fault:
    source = open_source(directory, trust_remote_code=trust_remote_code)
    layout = bf16.describe(source, FormatOptions())
    try:
        return verify_reload(source, layout, bf16, directory)
    except SwiftFP8Error as error:  # RunFailed, or tensors that the architecture does not have
        return Fault(where="reload by transformers", what=error.what)

"""Which linears a user's name patterns mean: LoRA targets, and what to keep out of FP8.

A pattern that means nothing is a mistake, and is answered with the closest name that exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.meta import LinearMeta, ModelMeta
from swiftfp8.registry import suggest, unknown

NO_LORA = {
    "router": "it is a router",
    "experts": "it is the 3-D parameter of all experts",
    "score": "it is new, and trained whole",
    "unused": "nothing reads what it puts out",
}


def matches(name: str, pattern: str) -> bool:
    """Whether a shell glob on the full module name, or on a dotted suffix of it, fits `name`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def lora_targets(
    target_modules: Sequence[str], meta: ModelMeta
) -> tuple[set[str], list[SwiftFP8Error]]:
    """Full names of the linears that get LoRA, from `target_modules`."""
    plain = {linear.name for linear in meta.linears if linear.kind in ("linear", "pooler")}
    targets: set[str] = set()
    problems: list[SwiftFP8Error] = []
    for wanted in target_modules:
        if wanted == "all-linear":
            targets |= plain
            if not plain:
                problems.append(_no_linear(meta))
            continue
        found = [m for m in meta.linears if m.name == wanted or m.name.endswith(f".{wanted}")]
        if not found:
            known = {m.name.rpartition(".")[2] for m in meta.linears if m.kind not in NO_LORA}
            where = "target_modules"
            problems.append(unknown("target module", wanted, {*known, "all-linear"}, where=where))
        elif reason := _why_no_lora(found, meta):
            problems.append(SwiftFP8Error(f"'{wanted}' can't have LoRA: {reason}", fix="drop it"))
        targets |= {m.name for m in found if m.kind not in NO_LORA}
    if not target_modules:
        problems.append(
            SwiftFP8Error(
                "tuner=lora has no layer to adapt",
                where="target_modules",
                fix="set target_modules=all-linear, or name linears, as in [q_proj,v_proj]",
            )
        )
    return targets, problems


def _no_linear(meta: ModelMeta) -> SwiftFP8Error:
    return SwiftFP8Error(
        f"{meta.architecture} has no linear to adapt besides its head",
        where="target_modules=all-linear",
        fix="set tuner=full",
    )


def _why_no_lora(found: list[LinearMeta], meta: ModelMeta) -> str | None:
    kinds = {linear.kind for linear in found}
    if kinds <= set(NO_LORA):
        return NO_LORA[kinds.pop()]
    if meta.tied_head and any(linear.kind == "head" for linear in found):
        return "its weight is the embedding's too"
    return None


def unmatched_excludes(patterns: Sequence[str], meta: ModelMeta) -> list[SwiftFP8Error]:
    """A problem for every `precision.exclude` pattern that fits no linear."""
    names = [linear.name for linear in meta.linears]
    parts = {".".join(name.split(".")[-k:]) for name in names for k in (1, 2)} | set(names)
    problems = []
    for pattern in patterns:
        if any(matches(name, pattern) for name in names):
            continue
        if any(matches(name, f"{pattern}.*") for name in names):
            best: str | None = f"{pattern}.*"
        else:
            best = suggest(pattern, parts)
        fix = f"did you mean {best}?" if best else f"linears here: {', '.join(_last_parts(names))}"
        problems.append(
            SwiftFP8Error(
                f"precision.exclude pattern '{pattern}' matches no linear",
                where="precision.exclude",
                fix=fix,
            )
        )
    return problems


def _last_parts(names: list[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})

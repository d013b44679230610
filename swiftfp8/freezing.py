"""`tuner=freeze`: which modules are trained; all others stay as they are, in FP8 where planned.

A module is named by its full path; all that lies below it, norms and biases too, is trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.meta import LinearMeta, ModelMeta
from swiftfp8.registry import suggest
from swiftfp8.selection import matches

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config


def trained_modules(config: Config, meta: ModelMeta) -> tuple[tuple[str, ...], list[SwiftFP8Error]]:
    """Paths of the modules that `freeze.last_layers` and `freeze.modules` name; all problems."""
    if config.tuner != "freeze":
        return (), []
    problems = []
    count = config.freeze.last_layers
    if count > meta.num_layers:
        problems.append(
            SwiftFP8Error(
                f"the model has {meta.num_layers} layers, fewer than {count}",
                where="freeze.last_layers",
                fix=f"set freeze.last_layers={meta.num_layers} or less, or tuner=full",
            )
        )
    chosen = {
        _layer_path(linear)
        for linear in meta.linears
        if linear.layer is not None and linear.layer >= meta.num_layers - count
    }
    for pattern in config.freeze.modules:
        found = [linear for linear in meta.linears if matches(linear.name, pattern)]
        if not found:
            parts = {linear.name.rpartition(".")[2] for linear in meta.linears}
            best = suggest(pattern, parts)
            fix = f"did you mean {best}?" if best else f"linears here: {', '.join(sorted(parts))}"
            what = f"freeze.modules: '{pattern}' matches no linear"
            problems.append(SwiftFP8Error(what, where="freeze.modules", fix=fix))
        if meta.tied_head and any(linear.kind == "head" for linear in found):
            problems.append(
                SwiftFP8Error(
                    "the head's weight is the embedding's too, which stays frozen",
                    where="freeze.modules",
                    fix="leave the head out, or set tuner=full",
                )
            )
        chosen |= {linear.name for linear in found}
    if not chosen and not problems:
        fix = "set freeze.last_layers=2, or name linears in freeze.modules"
        what = "tuner=freeze has nothing to train"
        problems.append(SwiftFP8Error(what, where="freeze.last_layers=0", fix=fix))
    whole = {path for path in chosen if not any(path.startswith(f"{o}.") for o in chosen)}
    return (*sorted(whole), *meta.head_modules), problems


def is_below(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a module or parameter of that name is one of `modules`, or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _layer_path(linear: LinearMeta) -> str:
    """The path of the decoder layer that a linear is in."""
    head, _, _ = linear.name.partition(f".{linear.layer}.")
    return f"{head}.{linear.layer}"

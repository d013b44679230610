"""The plan for people (a table that fits 80 columns) and for programs (JSON).

Linears of the same role in every decoder layer share a row, so that a model of 80 layers is read
in one screen; where some layers differ from the rest, the row says which.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from swiftfp8.plan import FP8_RECIPES, LayerPlan, MemoryEstimate, Plan

KEPT = {
    "none": "all activations, nothing is recomputed",
    "selective": "what matmuls and attention put out, the rest is recomputed",
    "full": "each decoder layer's input, the layer is recomputed",
}
MEMORY_PARTS = {
    "weights": "weights",
    "transposes": "FP8 copies and transposes",
    "adapters": "adapters (FP32)",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "activations": "activations",
    "logits": "logits and loss",
    "workspace": "workspace",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Print what every linear gets and why, the memory estimate, and the notes."""
    console.print(_header(plan))
    for fallback in plan.fallbacks:
        console.print(_fallback(fallback.asked, fallback.given, fallback.reason))
    console.print()
    console.print(_layers_table(plan))
    console.print(_coverage_line(plan))
    console.print()
    console.print(_memory_table(plan))
    for note in plan.notes:
        console.print(Padding(Text(f"note: {note}"), (0, 0, 0, 2)))
    for warning in plan.warnings:
        print_warning(warning, console)


def print_warning(said: str, console: Console) -> None:
    """Print a sentence that should not be missed."""
    console.print(_warning(said))


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The whole plan as JSON-able values, the memory's total included."""
    values = dataclasses.asdict(plan)
    values["memory"]["total"] = plan.memory.total
    return values


def plan_to_json(plan: Plan) -> str:
    """The text of `plan.json`."""
    return json.dumps(plan_to_dict(plan), indent=2) + "\n"


def precision_report(plan: Plan) -> dict[str, Any]:
    """What `precision_report.json` holds: every linear by name, the fallbacks, the coverage."""
    return {
        "model": plan.model_name,
        "hardware": plan.hardware_name,
        "asked_dtype": plan.asked_dtype,
        "compute_dtype": plan.compute_dtype,
        "recipe": None if plan.recipe is None else dataclasses.asdict(plan.recipe),
        "backend": plan.backend,
        "planned_coverage": plan.coverage,
        "planned_decoder_coverage": plan.decoder_coverage,
        "min_coverage": plan.min_coverage,
        "fallbacks": [dataclasses.asdict(fallback) for fallback in plan.fallbacks],
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
        "layers": {
            layer.name: {
                "precision": layer.precision,
                "reason": layer.reason,
                "shape": [layer.out_features, layer.in_features],
                "lora": layer.lora,
                "trainable": layer.trainable,
            }
            for layer in plan.layers
        },
    }


def group_layers(layers: Sequence[LayerPlan]) -> list[tuple[str, list[LayerPlan]]]:
    """Linears that share role, shape and treatment, each group with a name for all of them.

    `model.layers.*.mlp.up_proj` stands for every layer; `model.layers.{0,27}.mlp.up_proj` for two
    of them where the rest are treated otherwise.
    """
    groups: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        same = dataclasses.replace(layer, name=_role(layer.name))
        groups.setdefault(dataclasses.astuple(same), []).append(layer)
    roles = [_role(group[0].name) for group in groups.values()]
    return [
        (_group_name(group, alone=roles.count(role) == 1), group)
        for role, group in zip(roles, groups.values(), strict=True)
    ]


def _role(name: str) -> str:
    """The module path with its first number, the decoder layer, left open."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _group_name(group: list[LayerPlan], *, alone: bool) -> str:
    if len(group) == 1:
        return group[0].name
    role = _role(group[0].name)
    if alone:
        return role
    numbers = sorted(int(match[1]) for g in group if (match := re.search(r"\.(\d+)\.", g.name)))
    return role.replace("*", "{" + _ranges(numbers) + "}", 1)


def _ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as 0,3-5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _header(plan: Plan) -> Text:
    given = plan.compute_dtype
    if plan.recipe is not None:
        given = f"{plan.recipe.recipe} by {plan.backend}, the rest in {plan.compute_dtype}"
    tuning = f"{len(plan.trained)} modules trained" if plan.trained else "every weight trained"
    if plan.master_weights:
        tuning += ", BF16 with exact FP32 masters"
        tuning += f", Adam's moments in {plan.state_dtype.upper()}"
    if plan.lora is not None:
        tuning = f"LoRA r={plan.lora.rank} on {len(plan.lora.targets)} linears"
    lines = Text()
    for label, value in (
        ("model", plan.model_name),
        ("hardware", plan.hardware_name),
        ("precision", f"{plan.asked_dtype} asked, {given} given"),
        ("tuning", tuning),
        ("layers", _fusion(plan)),
        ("keeping", f"{KEPT[plan.gradient_checkpointing]} ({plan.checkpointing_reason})"),
        ("loss", f"{'fused with the head' if plan.loss.fused else 'plain'}: {plan.loss.reason}"),
    ):
        if not value:
            continue
        lines.append(f"{label:<11}", style="bold")
        lines.append(f"{value}\n")
    lines.rstrip()
    return lines


def _fusion(plan: Plan) -> str:
    """What the torch backend makes of the decoder layers."""
    fusion = plan.fusion
    if plan.backend != "torch":
        return ""
    rest = f"; linear by linear the others: {fusion.reason}" if fusion.reason else ""
    if fusion.compiled:
        return f"0 of {fusion.total} fused, {fusion.reason}; compiled by torch.compile instead"
    graphs = ", replayed as CUDA graphs" if fusion.graphs else ""
    return f"{fusion.layers} of {fusion.total} fused into one function each{graphs}{rest}"


def _fallback(asked: str, given: str, reason: str) -> Text:
    return _warning(f"{asked} can't be had, {given} is used: {reason}")


def _warning(said: str) -> Text:
    text = Text("WARNING ", style="bold yellow")
    text.append(said, style="yellow")
    return text


def _layers_table(plan: Plan) -> Group:
    """One row a group; reasons are numbered and follow below, in full width."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("linear", overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("out x in", justify="right", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("LoRA" if plan.lora else "train", no_wrap=True)
    table.add_column("why", justify="right", no_wrap=True)
    reasons: dict[str, int] = {}
    for name, group in group_layers(plan.layers):
        layer = group[0]
        in_fp8 = layer.precision in FP8_RECIPES
        adapted = f"r={layer.lora_rank or plan.lora.rank}" if plan.lora and layer.lora else ""
        table.add_row(
            Text(name),
            str(sum(member.count for member in group)),
            f"{layer.out_features} x {layer.in_features}",
            Text(layer.precision, style="green" if in_fp8 else "yellow"),
            adapted or ("yes" if layer.trainable else "-"),
            str(reasons.setdefault(layer.reason, len(reasons) + 1)),
        )
    said = {fallback.reason for fallback in plan.fallbacks}
    notes = [
        Padding(Text(f"{n}  {'see the warning above' if why in said else why}"), (0, 0, 0, 2))
        for why, n in reasons.items()
    ]
    return Group(table, *notes)


def _coverage_line(plan: Plan) -> Text:
    if plan.recipe is None:
        return Text("FP8 coverage: none")
    text = (
        f"FP8 coverage: {plan.coverage:.1%} of all linears' FLOPs, "
        f"{plan.decoder_coverage:.1%} without the output head"
    )
    if plan.min_coverage:
        text += f" (at least {plan.min_coverage:.1%} asked)"
    return Text(text)


def _memory_table(plan: Plan) -> Group:
    memory = plan.memory
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("memory at the peak of a step (estimate)")
    table.add_column("GiB", justify="right", no_wrap=True)
    for part, label in MEMORY_PARTS.items():
        value = getattr(memory, part)
        if value:
            table.add_row(label, _gib(value))
    over = memory.total > memory.available
    table.add_row(
        Text("total", style="bold"),
        Text(_gib(memory.total), style="bold red" if over else "bold"),
    )
    table.add_row("usable on one device", _gib(memory.available))
    return Group(table, _batch_line(memory))


def _batch_line(memory: MemoryEstimate) -> Text:
    largest = memory.largest_micro_batch
    fits = f"{largest} rows fit" if largest > 1 else "1 row fits" if largest else "no row fits"
    return Text(
        f"micro-batch: {memory.micro_batch} x {memory.max_length} tokens; by this estimate {fits}"
    )


def _gib(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else "<0.01"

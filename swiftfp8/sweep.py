"""A sweep: a table of its runs first, then one run after the other, then what came of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swiftfp8.config.compose import Composed
from swiftfp8.failures import report


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One run's line in the summary."""

    status: str
    run_dir: str = ""
    last_loss: float | None = None
    eval_loss: float | None = None


def run_sweep(members: Sequence[Composed], console: Console) -> int:
    """Train every member with its own run directory; 1 where one failed, 130 on Ctrl-C.

    A member that fails is reported and the others go on.
    """
    names = member_names(members)
    print_runs(names, console)
    outcomes: list[Outcome] = []
    for number, (member, name) in enumerate(zip(members, names, strict=True), 1):
        console.rule(Text(f"run {number} of {len(members)}: {name}"))
        outcomes.append(_train(member, console))
        if outcomes[-1].status == "interrupted":
            break
    outcomes += [Outcome(status="not run")] * (len(members) - len(outcomes))
    _print_summary(names, outcomes, console)
    statuses = {outcome.status for outcome in outcomes}
    if "interrupted" in statuses:
        return 130
    return 0 if statuses == {"done"} else 1


def dry_run_sweep(members: Sequence[Composed], console: Console) -> int:
    """Print every member's plan and check its rows; always 0, what is wrong raises."""
    from swiftfp8 import pipeline

    names = member_names(members)
    print_runs(names, console)
    for number, (member, name) in enumerate(zip(members, names, strict=True), 1):
        console.rule(Text(f"run {number} of {len(members)}: {name}"))
        pipeline.dry_run(member, console=console)
    return 0


def member_names(members: Sequence[Composed]) -> list[str]:
    """The overrides in which the members differ."""
    shared = set.intersection(*(set(member.overrides) for member in members))
    return [" ".join(text for text in member.overrides if text not in shared) for member in members]


def print_runs(names: Sequence[str], console: Console) -> None:
    """Say what is about to run."""
    table = Table(title=f"a sweep of {len(names)} runs", title_justify="left")
    table.add_column("run", justify="right")
    table.add_column("overrides", overflow="fold")
    for number, name in enumerate(names, 1):
        table.add_row(str(number), Text(name))
    console.print(table)


def _train(member: Composed, console: Console) -> Outcome:
    from swiftfp8 import pipeline

    try:
        result = pipeline.train(member, console=console)
    except KeyboardInterrupt as error:
        report(error)
        return Outcome(status="interrupted")
    except Exception as error:
        report(error)
        return Outcome(status="failed")
    return Outcome(
        status="interrupted" if result.interrupted else "done",
        run_dir=str(result.run_dir),
        last_loss=result.last_loss,
        eval_loss=result.eval_loss,
    )


def _print_summary(names: Sequence[str], outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table(title="what came of it", title_justify="left")
    table.add_column("run", justify="right")
    table.add_column("overrides", overflow="fold")
    table.add_column("loss", justify="right")
    table.add_column("eval loss", justify="right")
    table.add_column("status")
    for number, (name, outcome) in enumerate(zip(names, outcomes, strict=True), 1):
        losses = [
            "" if loss is None else f"{loss:.4f}" for loss in (outcome.last_loss, outcome.eval_loss)
        ]
        table.add_row(str(number), Text(name), *losses, outcome.status)
    console.print(table)
    for number, outcome in enumerate(outcomes, 1):
        if outcome.run_dir:
            console.print(
                f"run {number}: {outcome.run_dir}", markup=False, highlight=False, soft_wrap=True
            )

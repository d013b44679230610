"""How many optimizer steps a run has, and of what size: what is said of them before it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from swiftfp8.config.schema import Config
from swiftfp8.report.plan_table import print_warning
from swiftfp8.tuning import warm_up_warning

if TYPE_CHECKING:
    from swiftfp8.data.dataset import Datasets


def describe_steps(config: Config) -> str:
    """How long a run trains, in steps of what size, and how fast it learns."""
    length = f"{config.max_steps} step(s)" if config.max_steps > 0 else ""
    length = length or f"{config.num_train_epochs:g} epoch(s) in steps"
    rate = "auto" if config.learning_rate is None else f"{config.learning_rate:g}"
    schedule = config.optim.lr_scheduler_type
    return f"training: {length} of {_step_size(config)}, learning rate {rate} ({schedule})"


def size_steps(config: Config, datasets: Datasets, console: Console) -> Config:
    """`config` with steps of the size that it asks for, in rows; says what that makes of them."""
    from swiftfp8.train.arguments import with_tokens_per_step

    if config.data.streaming:
        return config
    rows = len(datasets.train)
    if config.train.tokens_per_step:
        config, said = with_tokens_per_step(config, datasets.report.train.tokens, rows)
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    warn_of_warm_up(config, rows, console)
    return config


def warn_of_warm_up(config: Config, rows: int, console: Console) -> None:
    """Say where the rows give so few steps that warm-up takes them all; max_steps is the plan's."""
    from swiftfp8.train.arguments import count_steps

    if config.max_steps > 0 or not rows:
        return
    steps = count_steps(rows, config)
    given = f"{rows:,} rows, {config.num_train_epochs:g} time(s) in steps of {_step_size(config)}"
    said = warm_up_warning(config, steps, f"{given}, give {steps} step(s)")
    if said:
        print_warning(said, console)


def _step_size(config: Config) -> str:
    if config.train.tokens_per_step:
        return f"about {config.train.tokens_per_step:,} tokens"
    return f"{config.per_device_train_batch_size} x {config.gradient_accumulation_steps} rows"

"""The configuration in transformers' terms."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from swiftfp8.config.schema import Config
from swiftfp8.plan import Plan
from swiftfp8.tuning import pick_learning_rate, warm_up_steps

OWN_OPTIMIZERS = ("lion", "muon")


def training_arguments(
    config: Config, plan: Plan, run_dir: Path, total_steps: int, *, autocast: bool = False
) -> TrainingArguments:
    """`TrainingArguments` for a run.

    Cadence (logging, evaluation, saving) is ours, so transformers' own is switched off. BF16 is
    ours too (see `FP8Trainer.compute_loss_context_manager`); FP16 is accelerate's, with its loss
    scaler. Gradient checkpointing was switched on in the model, under the backend's own function.
    `autocast` leaves BF16 to accelerate as well.
    """
    optim = config.optim
    shape: dict[str, Any] = {}
    if optim.lr_scheduler_type == "cosine_with_min_lr":
        shape = {"min_lr_rate": optim.min_lr_ratio}
    elif optim.lr_scheduler_type == "warmup_stable_decay":
        decay = math.ceil(optim.decay_ratio * total_steps)
        shape = {"num_decay_steps": decay, "min_lr_ratio": optim.min_lr_ratio}
    arguments = TrainingArguments(
        output_dir=str(run_dir),
        run_name=run_dir.name,
        report_to=list(config.report_to) or "none",
        per_device_train_batch_size=config.per_device_train_batch_size,
        per_device_eval_batch_size=config.per_device_eval_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        max_steps=total_steps,
        num_train_epochs=config.num_train_epochs,
        # Optimizers that transformers has not are made by FP8Trainer.create_optimizer.
        optim=optim.name if optim.name not in OWN_OPTIMIZERS else "adamw_torch",
        learning_rate=pick_learning_rate(config, fp8=plan.recipe is not None),
        neftune_noise_alpha=config.neftune_noise_alpha or None,
        weight_decay=config.weight_decay,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_epsilon=optim.adam_epsilon,
        lr_scheduler_type=optim.lr_scheduler_type,
        lr_scheduler_kwargs=shape,
        # A whole number: a share of 1.0 would be read as one step.
        warmup_steps=warm_up_steps(config, total_steps),
        # Infinity measures the norm without clipping.
        max_grad_norm=config.max_grad_norm or math.inf,
        fp16=plan.compute_dtype == "fp16",
        bf16=autocast and plan.compute_dtype == "bf16",
        seed=config.seed,
        data_seed=config.seed,
        ignore_data_skip=config.data.streaming,  # a stream goes on at a place, and skips nothing
        dataloader_num_workers=config.data.num_workers,
        dataloader_pin_memory=plan.device == "cuda",
        use_cpu=plan.device == "cpu",
        logging_steps=config.train.logging_steps,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,  # the guard looks at every step, with one read
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        log_level="error",
    )
    if arguments.world_size == 1:
        arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one GPU: never DataParallel
    return arguments


def with_tokens_per_step(config: Config, tokens: int, rows: int) -> tuple[Config, str | None]:
    """`config` with the accumulation that `train.tokens_per_step` means, and a line that says it.

    `tokens` are those of all training rows (or packs), `rows` their number.
    """
    wanted = config.train.tokens_per_step
    if not wanted:
        return config, None
    batch = config.per_device_train_batch_size
    mean = tokens / rows
    count = max(1, round(wanted / (batch * mean)))
    line = (
        f"train.tokens_per_step={wanted}: {count} micro-batches of {batch} rows a step, about "
        f"{count * batch * mean:,.0f} tokens ({mean:,.0f} a row)"
    )
    if wanted > tokens:
        line += f"; that is more than the {tokens:,} of all rows, so a pass over them is one step"
    if count == 1 and batch * mean > 1.5 * wanted:
        line += "; a smaller per_device_train_batch_size comes nearer"
    return replace(config, gradient_accumulation_steps=count), line


def count_steps(rows: int | None, config: Config, world_size: int = 1) -> int:
    """Optimizer steps of the whole run; a stream, whose `rows` are None, has `max_steps`."""
    if config.max_steps > 0:
        return config.max_steps
    assert rows is not None
    batches = math.ceil(rows / (config.per_device_train_batch_size * world_size))
    per_epoch = math.ceil(batches / config.gradient_accumulation_steps)
    return math.ceil(config.num_train_epochs * per_epoch)

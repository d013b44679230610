"""The configuration in transformers' terms."""

from __future__ import annotations

import math
from pathlib import Path

from transformers import TrainingArguments

from swiftfp8.config.schema import Config
from swiftfp8.plan import Plan


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
    minimum = {"min_lr_rate": optim.min_lr_ratio}
    arguments = TrainingArguments(
        output_dir=str(run_dir),
        run_name=run_dir.name,
        report_to=list(config.report_to) or "none",
        per_device_train_batch_size=config.per_device_train_batch_size,
        per_device_eval_batch_size=config.per_device_eval_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        max_steps=total_steps,
        num_train_epochs=config.num_train_epochs,
        optim=optim.name,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_epsilon=optim.adam_epsilon,
        lr_scheduler_type=optim.lr_scheduler_type,
        lr_scheduler_kwargs=minimum if optim.lr_scheduler_type == "cosine_with_min_lr" else {},
        # A whole number: a share of 1.0 would be read as one step.
        warmup_steps=math.ceil(config.warmup_ratio * total_steps),
        # Infinity measures the norm without clipping.
        max_grad_norm=config.max_grad_norm or math.inf,
        fp16=plan.compute_dtype == "fp16",
        bf16=autocast and plan.compute_dtype == "bf16",
        seed=config.seed,
        data_seed=config.seed,
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


def count_steps(rows: int, config: Config, world_size: int = 1) -> int:
    """Optimizer steps of the whole run."""
    batches = math.ceil(rows / (config.per_device_train_batch_size * world_size))
    per_epoch = math.ceil(batches / config.gradient_accumulation_steps)
    if config.max_steps > 0:
        return config.max_steps
    return math.ceil(config.num_train_epochs * per_epoch)

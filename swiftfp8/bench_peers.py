"""What `swiftfp8 bench` compares with: transformers.Trainer on a PEFT model, eager or compiled.

The peers get what the job asks for (rows, their order and padding, batch, LoRA, optimizer) and none
of our parts: PEFT's own LoRA layers, accelerate's autocast, the model's own loss or Liger's.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Sampler

from swiftfp8.adapters.lora import compact_targets
from swiftfp8.bench import quartiles
from swiftfp8.config.schema import Config
from swiftfp8.data.dataset import load_datasets
from swiftfp8.errors import SwiftFP8Error
from swiftfp8.freezing import is_below
from swiftfp8.hardware import probe
from swiftfp8.models.load import load_meta, load_model, load_tokenizer
from swiftfp8.models.source import resolve_source
from swiftfp8.plan import LoraPlan, Plan, build_plan
from swiftfp8.threads import limited_threads
from swiftfp8.train.arguments import OWN_OPTIMIZERS, training_arguments, with_tokens_per_step
from swiftfp8.train.batches import EpochSampler, count_tokens
from swiftfp8.train.flops import flops_per_token, peak_flops
from swiftfp8.train.metrics import peak_memory_gib


def train_peer(config: Config, folder: Path, *, warmup: int, compiled: bool) -> dict[str, Any]:
    """Train `config.max_steps` steps, the first `warmup` untimed; returns a row's values.

    Raises:
        SwiftFP8Error: where the peer can't run here.
    """
    if config.task not in ("sft", "pretrain"):
        raise SwiftFP8Error(f"peers are compared in task=sft and pretrain, not in {config.task}")
    if config.optim.name in OWN_OPTIMIZERS or config.lora_plus_ratio != 1.0:
        what = (
            "lora_plus_ratio"
            if config.lora_plus_ratio != 1.0
            else f"optim.name={config.optim.name}"
        )
        raise SwiftFP8Error(f"transformers' trainer has no {what}")
    if config.data.loss_weights:
        raise SwiftFP8Error("transformers' trainer has no data.loss_weights")
    if config.data.streaming:
        raise SwiftFP8Error("peers are given rows that are held whole, not a stream")
    source = resolve_source(config)
    meta, hardware = load_meta(source, config), probe()
    if compiled and hardware.device != "cuda":
        raise SwiftFP8Error("compiled layers and Liger's loss are compared on a GPU only")
    loss = replace(config.train, fused_loss="auto" if compiled else "off")
    high = config.dtype if config.dtype != "fp8" else "bf16"
    plan = build_plan(replace(config, dtype=high, train=loss), hardware, meta)
    tokenizer = load_tokenizer(source, config.template, config.trust_remote_code)
    padding = build_plan(config, hardware, meta).fp8_token_multiple  # rows as the plan pads them
    datasets = load_datasets(config, tokenizer, padding)
    tokens = datasets.report.train.tokens
    config, _ = with_tokens_per_step(config, tokens, len(datasets.train))
    transformers.set_seed(config.seed)
    model: Any = load_model(
        source,
        plan.weight_dtype,
        attn_implementation=config.attn_implementation,
        trust_remote_code=config.trust_remote_code,
    )
    if compiled:
        _apply_liger(model)
    model = model.to(plan.device)
    recompute = "none" if plan.gradient_checkpointing == "none" else "full"
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if plan.lora is not None:
        model = _with_lora(model.requires_grad_(False), plan.lora)
    elif plan.trained:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_below(name, plan.trained))
    if compiled:
        _compile_layers(model)
    trainer = _Peer(
        seed=config.seed if config.data.shuffle else None,
        model=model,
        args=training_arguments(config, plan, folder / "peer", config.max_steps, autocast=True),
        data_collator=datasets.collator,
        train_dataset=datasets.train,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    with limited_threads(plan.cpu_threads):  # as many as ours has
        trainer.train()
    return {"precision": plan.compute_dtype, "recompute": recompute, **trainer.result(plan, warmup)}


class _Peer(transformers.Trainer):
    """transformers.Trainer on rows in our order, with a clock."""

    def __init__(self, *, seed: int | None, **kwargs: Any) -> None:
        self._seed = seed
        self._times: list[float] = []
        self._tokens: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self._ends: list[int] = []  # micro-batches up to the end of each step
        super().__init__(**kwargs)
        self.add_callback(_Clock(self._step_ended))

    def result(self, plan: Plan, warmup: int) -> dict[str, Any]:
        """Speed, memory and loss of the steps after the first `warmup`."""
        timed = len(self._times) - warmup
        seconds = self._times[-1] - self._times[warmup - 1]
        ends = self._ends[warmup - 1 :]
        counts = [sum(map(int, self._tokens[a:b])) for a, b in pairwise(ends)]
        times = [b - a for a, b in pairwise(self._times[warmup - 1 :])]
        cuda = plan.device == "cuda"
        peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
        rate = sum(counts) / seconds
        losses = [float(loss) for loss in self._losses]
        return {
            "tokens_per_second": rate,
            "quartiles": quartiles([n / t for n, t in zip(counts, times, strict=True)]),
            "ms_per_step": 1e3 * seconds / timed,
            "peak_gib": peak_memory_gib(cuda=cuda),
            "mfu": rate * flops_per_token(plan) / peak if peak else None,
            "first_loss": sum(losses[: self._ends[0]]),
            "last_loss": sum(losses[self._ends[-2] :]),
        }

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Count a micro-batch's tokens and keep its share of the step's loss."""
        self._tokens.append(torch.as_tensor(count_tokens(inputs)))
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._losses.append(loss.detach())
        return loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        if self._seed is None:
            return super()._get_train_sampler(train_dataset)
        return EpochSampler(len(self.train_dataset), self._seed)

    def _step_ended(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._times.append(time.perf_counter())
        self._ends.append(len(self._tokens))


class _Clock(transformers.TrainerCallback):
    def __init__(self, ended: Any) -> None:
        self._ended = ended

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended()


def _with_lora(model: Any, lora: LoraPlan) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        target_modules=compact_targets(lora.targets, (name for name, _ in model.named_modules())),
        use_dora=lora.use_dora,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
        modules_to_save=list(lora.modules_to_save) or None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _apply_liger(model: Any) -> None:
    """Liger's fused loss alone: with its other kernels compiled layers were slower."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise SwiftFP8Error(
            "liger-kernel is not installed", fix="pip install liger-kernel"
        ) from error
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if apply is None:
        raise SwiftFP8Error(f"liger-kernel does not know model_type {model.config.model_type}")
    known = inspect.signature(apply).parameters
    switches = {name: False for name, value in known.items() if value.default in (True, False)}
    apply(model=model, **switches | {"fused_linear_cross_entropy": True})


def _compile_layers(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "self_attn") and hasattr(module, "mlp"):
            module.compile()

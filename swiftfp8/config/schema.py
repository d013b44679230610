"""Every option of swiftfp8, typed, documented and validated in one place.

Everyday keys are flat and named as transformers, PEFT and ms-swift name them; the rest lives in
groups. pydantic checks types and reports every problem of a configuration at once. The docstring
under a field is its help text: `config explain`, docs/options.md and shell completion read it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from swiftfp8.config.export_group import ExportConfig
from swiftfp8.config.groups import (
    DataConfig,
    EmbeddingConfig,
    FreezeConfig,
    GuardConfig,
    OptimConfig,
    PrecisionConfig,
    RlhfConfig,
    TrainConfig,
)
from swiftfp8.config.kinds import (
    FREE_TEXT,
    STRICT,
    BelowOne,
    Checkpointing,
    Fraction,
    Names,
    NonNegativeFloat,
    PathText,
    Positive,
    Real,
    Seed,
    Sources,
    Whole,
    null_for_auto,
    some_steps,
)

__all__ = [
    "Config",
    "DataConfig",
    "EmbeddingConfig",
    "ExportConfig",
    "FreezeConfig",
    "GuardConfig",
    "OptimConfig",
    "PrecisionConfig",
    "RlhfConfig",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """One training job. Flat keys are everyday ones; groups hold the rest."""

    model_type: str | None = None
    """Model family, a file of `configs/model/`; found from the checkpoint where left out."""
    model: PathText | None = None
    """Local directory, GGUF file, or hub id; left out, the family's default."""
    hub: Literal["hf", "modelscope"] = "hf"
    """Where a hub id is looked up."""
    dataset: Sources = Field(default_factory=list)
    """Files, hub ids or registered names, each with an optional `#N` to sample N rows."""
    val_dataset: Sources = Field(default_factory=list)
    """Rows to evaluate on."""
    split_dataset_ratio: Fraction = 0.0
    """Share of `dataset` set aside for evaluation where `val_dataset` is empty."""
    task: Literal["sft", "pretrain", "seq_cls", "dpo", "reward", "embedding"] = "sft"
    """`sft` learns the assistant's turns, `pretrain` every token of plain text, `seq_cls` a label
    for each row, `dpo` (and its kin, `rlhf.loss_type`) preferences, `reward` a score that ranks
    preferences, `embedding` vectors of texts."""
    num_labels: Positive | None = None
    """`seq_cls`: how many labels there are; left out, as many as the training rows have."""
    problem_type: (
        Literal["single_label_classification", "multi_label_classification", "regression"] | None
    ) = None
    """`seq_cls`: what a label means, by its transformers name; left out, the rows tell."""
    dtype: Literal["fp8", "bf16", "fp16", "fp32"] = "fp8"
    """Precision asked for; the plan says what each layer gets."""
    tuner: Literal["lora", "freeze", "full"] = "lora"
    """`lora` trains adapters on a frozen base; `freeze` trains the last layers (`freeze.*`) and
    leaves the rest; `full` trains every weight."""
    lora_rank: Positive = 8
    """LoRA r."""
    lora_alpha: Annotated[Real, Field(gt=0.0)] = 32
    """LoRA alpha; the update is scaled by alpha / r (alpha / sqrt(r) with `use_rslora`)."""
    lora_dropout: BelowOne = 0.0
    """Dropout on LoRA's input."""
    use_rslora: bool = False
    """Rank-stabilised scaling, alpha / sqrt(r)."""
    use_dora: bool = False
    """DoRA: LoRA turns the rows of a weight, and their lengths are trained apart."""
    lora_plus_ratio: Annotated[Real, Field(ge=1.0)] = 1.0
    """LoRA+: how many times A's learning rate B has (16 is usual)."""
    init_lora: Literal["default", "gaussian", "pissa"] = "default"
    """How A and B begin: A by `default` (Kaiming uniform) or `gaussian`, and B as zero; or both as
    the weight's largest singular vectors, which the base then lacks (`pissa`)."""
    rank_pattern: dict[str, Positive] = Field(default_factory=dict)
    """Ranks of single linears, by regular expressions on the end of a name: `{down_proj: 16}`."""
    alpha_pattern: dict[str, Annotated[Real, Field(gt=0.0)]] = Field(default_factory=dict)
    """Alphas of single linears, as in `rank_pattern`."""
    modules_to_save: Names = Field(default_factory=list)
    """Linears that are trained whole beside LoRA, in high precision, and saved with the adapter."""
    target_modules: Names = Field(default_factory=lambda: ["all-linear"])
    """Linears that get LoRA: last name parts, or `all-linear` (all but the head)."""
    max_length: Positive = 2048
    """Tokens a row may have."""
    packing: bool = False
    """Put several rows into one sequence of `max_length` tokens; they don't see each other."""
    system: Annotated[str | None, FREE_TEXT] = None
    """System prompt for rows that have none."""
    template: PathText | None = None
    """Jinja chat template that replaces the tokenizer's own: a file, or `chatml` or `gemma`."""
    num_train_epochs: Annotated[Real, Field(gt=0.0)] = 1.0
    """Passes over the data."""
    max_steps: Annotated[Whole, Field(ge=-1), AfterValidator(some_steps)] = -1
    """Optimizer steps; -1 goes by epochs."""
    per_device_train_batch_size: Positive = 1
    """Rows a micro-batch holds."""
    per_device_eval_batch_size: Positive = 1
    """Rows an evaluation batch holds."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches an optimizer step adds up."""
    learning_rate: Annotated[
        Annotated[Real, Field(gt=0.0)] | None, BeforeValidator(null_for_auto)
    ] = 1e-4
    """Peak learning rate; `auto` (or null) takes 1e-4 for LoRA and 1e-5 for `tuner=full`, times
    `optim.fp8_lr_scale` where FP8 runs."""
    warmup_ratio: Fraction = 0.03
    """Share of all steps spent warming up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradient clipping; 0 turns it off."""
    neftune_noise_alpha: NonNegativeFloat = 0.0
    """NEFTune: noise on the embeddings' output while training (5 is usual); 0 is none."""
    gradient_checkpointing: Checkpointing = "auto"
    """Recompute activations in the backward pass: `full` (or true) a whole layer at a time, for the
    least memory and about a third more time; `selective` what is cheap to make again; `none` (or
    false) nothing; `auto` the first of none, selective, full that fits the device's memory."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention kernel, by its transformers name; `flash_attention_2` and `flex_attention` need a
    GPU, and packed rows no mask there."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    seed: Seed = 42
    """Seed of initialisation, data order and dropout."""
    output_dir: PathText = "output"
    """Parent of run directories `<model>-<task>-<timestamp>`."""
    run_name: str | None = None
    """Name of the run directory, in place of the generated one."""
    export_dir: PathText | None = None
    """Where an export is written; set, training ends with an export. Left out: `<run>/export`."""
    export_quantization_bit: Literal[8, 16] | None = None
    """8 exports FP8, 16 merged BF16, as ms-swift writes it; set, training ends with an export.
    It is what `export.format=auto` takes: another `export.format` counts in its place."""
    resume_from_checkpoint: PathText | None = None
    """A `checkpoint-N` or run directory to go on from."""
    report_to: Names = Field(default_factory=list)
    """`tensorboard`, `wandb`, `swanlab`."""
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    freeze: FreezeConfig = Field(default_factory=FreezeConfig)
    rlhf: RlhfConfig = Field(default_factory=RlhfConfig)
    embedding: EmbeddingConfig = Field(default_factory=EmbeddingConfig)

"""Every option of swiftfp8, typed, documented and validated in one place.

Everyday keys are flat and named as transformers, PEFT and ms-swift name them; the rest lives in
groups. pydantic checks types and reports every problem of a configuration at once. The docstring
under a field is its help text: `config explain` and shell completion read it.
"""

from __future__ import annotations

import os.path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    coerce_numbers_to_str=True,
    validate_default=True,
    allow_inf_nan=False,
)

FREE_TEXT = "free text"
"""Marks a field whose command-line value is taken as typed: a comma in it is no sweep."""


def _as_list(value: Any) -> Any:
    """Take a single value, or a comma-separated string, for a list."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _frozen(value: list[str]) -> tuple[str, ...]:
    return tuple(value)


def _unchanging(value: list[float]) -> tuple[float, ...]:
    return tuple(value)


def _no_bool(value: Any) -> Any:
    """Keep `true` from passing for 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


def _on_off(value: Any) -> Any:
    """YAML reads `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _checkpointing(value: Any) -> Any:
    """Flags, as this key was once: true is `full`, false `none`."""
    flags = {"true": "full", "false": "none"}
    return flags.get(str(value).lower(), value) if isinstance(value, bool | str) else value


def _expand_user(value: str | None) -> str | None:
    return os.path.expanduser(value) if value else value


def _expand_users(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(os.path.expanduser(name) for name in value)


def _as_sizes(value: Any) -> Any:
    """Take a single number, or a comma-separated string, for a list."""
    return [value] if isinstance(value, int) else _as_list(value)


def _some_steps(value: int) -> int:
    if value == 0:
        raise ValueError("must be at least 1, or -1 to go by epochs")
    return value


def _ascending(value: list[int]) -> tuple[int, ...]:
    return tuple(sorted(set(value)))


Names = Annotated[list[str], BeforeValidator(_as_list), AfterValidator(_frozen)]
Sources = Annotated[Names, AfterValidator(_expand_users)]
PathText = Annotated[str, AfterValidator(_expand_user)]
Checkpointing = Annotated[
    Literal["auto", "none", "selective", "full"], BeforeValidator(_checkpointing)
]
OnOff = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Real = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[Whole, Field(ge=1)]
Sizes = Annotated[list[Positive], BeforeValidator(_as_sizes), AfterValidator(_ascending)]
NonNegative = Annotated[Whole, Field(ge=0)]
Share = Annotated[Real, Field(gt=0.0)]
Shares = Annotated[list[Share], BeforeValidator(_as_list), AfterValidator(_unchanging)]
Fraction = Annotated[Real, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[Real, Field(ge=0.0, lt=1.0)]
NonNegativeFloat = Annotated[Real, Field(ge=0.0)]


def _off(value: Any) -> Any:
    """Take YAML's `off`, which is read as false, for the word."""
    return "off" if value is False else value


def _auto(value: Any) -> Any:
    """Take the word `auto` for what is left to the plan."""
    return None if isinstance(value, str) and value.lower() == "auto" else value


def _schedule(value: Any) -> Any:
    """A schedule's short name."""
    return "warmup_stable_decay" if value == "wsd" else value


Judging = Annotated[Literal["warn", "fail", "off"], BeforeValidator(_off)]
Smoke = Annotated[Literal["auto", "require", "off"], BeforeValidator(_off)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class PrecisionConfig:
    """How FP8 is done, and what happens where it can't be."""

    recipe: Literal["auto", "mxfp8", "fp8_block", "fp8_current", "fp8_delayed"] = "auto"
    """FP8 scaling recipe; `auto` takes the first that hardware and libraries allow."""
    backend: Literal["auto", "te", "torch", "emulated"] = "auto"
    """Who runs FP8: `te` (Transformer Engine), `torch` (PyTorch and Triton alone) or
    `emulated` (the numerics only, on any device)."""
    head: Literal["bf16", "fp8"] = "bf16"
    """Precision of the frozen output head: `fp8` runs its matmuls in FP8 within the fused loss of
    the `torch` backend."""
    auto: bool = False
    """Take BF16 in place of FP8 where a step in FP8 is expected to be slower, and BF16 fits."""
    emulate: bool = False
    """Run FP8 numerics emulated where no FP8 hardware is found, instead of falling back."""
    fp8_format: Literal["e4m3", "hybrid"] = "hybrid"
    """`e4m3` everywhere, or `hybrid`: e4m3 forward, e5m2 for gradients."""
    margin: NonNegative = 0
    """Delayed scaling: scale is divided by 2**margin."""
    amax_history_len: Positive = 1024
    """Delayed scaling: how many past amax values a scale looks back on."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Delayed scaling: how the history becomes one amax."""
    split_accumulator: bool = False
    """Accumulate the forward product in full FP32 (slower, more exact); gradients always do."""
    backward_override: Literal["high_precision", "dequantized"] | None = None
    """Run backward matmuls in high precision on the original or the dequantized operands."""
    strict: bool = False
    """Make a fallback from the asked dtype an error."""
    min_coverage: Fraction = 0.0
    """Share of matmul FLOPs that must run in FP8, checked on the running modules."""
    exclude: Names = Field(default_factory=list)
    """Name patterns (shell globs or dotted suffixes) of linears to keep in high precision."""
    first_layers_bf16: NonNegative = 0
    """How many of the first decoder layers stay in high precision."""
    last_layers_bf16: NonNegative = 0
    """How many of the last decoder layers stay in high precision."""
    start_step: NonNegative = 0
    """Train in high precision up to this optimizer step, then switch FP8 on."""
    interval: NonNegative | None = None
    """Accepted from old configurations; Transformer Engine no longer has it."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """Reading, checking and tokenizing rows."""

    on_bad_row: Literal["error", "skip"] = "error"
    """Stop at a bad row, or count and skip it."""
    format: Literal[
        "auto", "alpaca", "sharegpt", "messages", "text", "label", "preference", "kto", "embedding"
    ] = "auto"
    """Row format; `auto` detects it from the columns and says so."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Rename columns before detection: `{question: instruction, answer: output}`."""
    truncation: Literal["right", "left", "split", "delete"] = "right"
    """Rows over `max_length`: cut the end or the beginning, go on in further rows, or drop them."""
    loss_scale: Literal["default", "last_round", "ignore_empty_think", "all"] = "default"
    """Which turns of a conversation are trained: every answer, those after the user's last turn,
    every answer without an empty reasoning at its beginning, or every token."""
    loss_weights: dict[
        Literal["assistant", "reasoning", "tool_call", "history", "prompt"], NonNegativeFloat
    ] = Field(default_factory=dict)
    """How much trained tokens count: `{reasoning: 0.5, tool_call: 2}`. `assistant` is the rest of
    an answer, `history` a factor for answers before the user's last turn, `prompt` all else where
    it is trained (`loss_scale=all`). What is left out counts 1; 0 trains nothing."""
    interleave_prob: Shares = Field(default_factory=list)
    """Mix the entries of `dataset` by these shares, one for each: `[0.7, 0.3]`; left out, they
    are put together whole."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """Mix until an entry is used up, or until all are, rows of the others being repeated."""
    cache: bool = False
    """Keep token rows in `~/.cache/swiftfp8/tokens` and take them from there where neither files,
    tokenizer nor an option that changes tokens has changed."""
    num_proc: Annotated[Positive | None, BeforeValidator(_auto)] = None
    """Processes that tokenize; `auto` (or null) takes one for every 4 MB of rows, as many as there
    are cores at most."""
    streaming: bool = False
    """Read, tokenize and pack rows of JSONL, parquet or a hub while training, for data sets that
    neither memory nor disk holds; it needs `max_steps`."""
    shuffle_buffer: Positive = 10_000
    """Rows of a stream that are held, and shuffled among themselves."""
    eval_rows: NonNegative = 0
    """Rows at the beginning of a stream that are evaluated on and not trained."""
    shuffle: bool = True
    """Shuffle training rows each epoch, by `seed`; without, they come in their order."""
    num_workers: NonNegative = 0
    """Processes that collate batches beside the training loop; 0 leaves it to the loop, which takes
    a fraction of a millisecond. A stream always has one."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimConfig:
    """Optimizer and schedule."""

    name: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "adafactor", "lion", "muon"] = (
        "adamw_torch"
    )
    """Optimizer. `adamw_8bit` is bitsandbytes'; `lion` wants a third to a tenth of AdamW's learning
    rate; `muon` steps matrices by their orthogonal part at AdamW's size, the rest by AdamW."""
    lr_scheduler_type: Annotated[
        Literal[
            "linear",
            "cosine",
            "constant",
            "constant_with_warmup",
            "cosine_with_min_lr",
            "polynomial",
            "inverse_sqrt",
            "warmup_stable_decay",
        ],
        BeforeValidator(_schedule),
    ] = "cosine"
    """Learning-rate schedule, by its transformers name; `wsd` is `warmup_stable_decay`."""
    min_lr_ratio: Fraction = 0.1
    """Lowest share of the learning rate, for `cosine_with_min_lr` and `warmup_stable_decay`."""
    decay_ratio: Fraction = 0.1
    """Share of all steps spent decaying at the end, for `warmup_stable_decay`."""
    fp8_lr_scale: Annotated[Real, Field(gt=0.0)] = 0.8
    """What `learning_rate=auto` is multiplied by where FP8 runs."""
    adam_beta1: BelowOne = 0.9
    """AdamW's first-moment decay."""
    adam_beta2: BelowOne = 0.95
    """AdamW's second-moment decay."""
    adam_epsilon: NonNegativeFloat = 1e-8
    """AdamW's denominator floor."""
    master_weights: bool = True
    """Train BF16 weights (`tuner=full`) on exact FP32 masters, for 6 more bytes a parameter:
    without them most updates at a usual learning rate are rounded away."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """What Adam's two moments are stored in beside FP32 masters: `bf16`, rounded stochastically,
    saves 4 bytes a parameter."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    """Cadence of logging, evaluation and checkpoints; how the loss is computed."""

    logging_steps: Positive = 5
    """Optimizer steps between log lines."""
    eval_steps: NonNegative = 50
    """Optimizer steps between evaluations; 0 evaluates at the end only."""
    save_steps: NonNegative = 100
    """Optimizer steps between checkpoints; 0 saves at the end only."""
    tokens_per_step: NonNegative = 0
    """Tokens of an optimizer step, in place of `gradient_accumulation_steps`: as many micro-batches
    as come nearest, by the mean length of the rows. 0 goes by `gradient_accumulation_steps`."""
    ema_decay: BelowOne = 0.0
    """Average the trained weights with this decay (0.999 is usual); the average is what is
    evaluated, saved and exported. 0 keeps none."""
    early_stopping_patience: NonNegative = 0
    """End the run after so many evaluations without a lower loss; 0 never."""
    save_total_limit: Positive = 2
    """How many checkpoints are kept, beside best and last."""
    images: bool = True
    """Write loss, learning rate, gradient norm and throughput as PNGs to `images/`."""
    fused_loss: OnOff = "auto"
    """Compute head and loss in chunks, so that the logits are never held whole: `auto` does where
    the model is known to allow it, `on` wherever nothing speaks against it."""
    cuda_graphs: bool = True
    """Replay the torch backend's fused layers as CUDA graphs: the host starts one thing a layer
    instead of forty kernels, which a small model, or few tokens a step, would wait for."""
    compile: bool = True
    """Compile decoder layers whose weights are trained (`tuner=full`, torch backend, CUDA)."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ExportConfig:
    """What the exported checkpoint looks like and how it is checked."""

    format: Literal[
        "auto", "fp8_block", "compressed_tensors", "fp8", "modelopt", "bf16", "adapter"
    ] = "auto"
    """`auto` takes `fp8_block` (e4m3 in 128x128 blocks, loaded by every engine), or
    `compressed_tensors` (one scale per channel) where most weights fit no block. `fp8` and
    `modelopt` have one scale per weight; `bf16` is merged only; `adapter` is not merged."""
    target: Literal["vllm", "sglang", "lmdeploy", "tensorrt_llm", "transformers"] | None = None
    """Engine that will serve the export: formats that it can't load are refused."""
    tp: Sizes = Field(default_factory=list)
    """Numbers of GPUs that an engine will split the export over, such as `[1,2,4,8]`: refused where
    heads or FP8 blocks do not divide. Left out, the report says which of 1, 2, 4 and 8 fit."""
    max_shard_size: str = "5GB"
    """Largest safetensors shard."""
    exclude: Names = Field(default_factory=list)
    """Name patterns of linears to leave in BF16, besides those that must."""
    verify: bool = True
    """Reload in a fresh process and compare logits before the export is called done."""
    fidelity: Judging = "warn"
    """Compare the export with its BF16 merge and hold the figures against the limits below: a
    missed one is a warning, or (`fail`) nothing is kept and the exit code is 1."""
    fidelity_dataset: Sources = Field(default_factory=list)
    """Held-out text for it; left out, the run's own evaluation rows, or else its training rows."""
    fidelity_tokens: Positive = 4096
    """How many tokens of it are read."""
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    """Scales of activations: taken by the engine as it runs, or `static`, measured on
    `calibration_dataset` (`compressed_tensors` and `fp8`; `modelopt` always is)."""
    kv_cache: Literal["fp8"] | None = None
    """`fp8` measures scales for keys and values on `calibration_dataset`, and engines then keep
    their cache in FP8 by them (`compressed_tensors`, for vLLM and SGLang)."""
    max_ppl_ratio: Annotated[Real, Field(gt=0.0)] | None = None
    """Largest perplexity, as a multiple of the BF16 merge's, and one over the smallest; left out,
    by the model's size."""
    max_kl: NonNegativeFloat | None = None
    """Largest mean KL divergence per token (nats); left out, by the model's size."""
    min_top1: Fraction | None = None
    """Smallest share of tokens with the same likeliest token; left out, by the model's size."""
    max_loss_increase: NonNegativeFloat = 0.005
    """By which share the loss on the run's own rows may rise or fall from un-merged adapter to
    export."""
    smoke: Smoke = "auto"
    """Run the export in vLLM, in a fresh process, and compare log-probabilities: where there is a
    vLLM (`auto`), always, or else fail (`require`), or never."""
    engine_python: PathText | None = None
    """Python of an environment that has vLLM; left out, this one."""
    calibrate: bool = False
    """Choose the rounding of every FP8 linear by its output on real rows (`fp8_block` only)."""
    calibration_dataset: Sources = Field(default_factory=list)
    """Rows for it, named as in `dataset`; left out, those that the run was trained on."""
    calibration_tokens: Positive = 16384
    """How many tokens of them are used."""
    min_survival: Fraction = 0.8
    """Smallest share of an adapter's update that must survive being merged into an FP8 base."""
    resume: bool = False
    """Go on with an export that was interrupted: finished shards are checked and kept. With it,
    Ctrl-C or a full disk leaves what is finished for the next attempt."""
    overwrite: bool = False
    """Replace an existing export directory."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class GuardConfig:
    """What happens when numbers go wrong."""

    on_nonfinite: Literal["stop", "ignore"] = "stop"
    """A loss or gradient norm that is not finite: stop with the layer named, or go on."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class FreezeConfig:
    """What `tuner=freeze` trains."""

    last_layers: NonNegative = 2
    """How many of the last decoder layers are trained whole, norms and biases too."""
    modules: Names = Field(default_factory=list)
    """Name patterns (shell globs or dotted suffixes) of linears that are trained besides."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RlhfConfig:
    """Learning from preferences: `task=dpo` and `task=reward`. Names are TRL's."""

    loss_type: Literal[
        "sigmoid", "hinge", "ipo", "apo_zero", "apo_down", "orpo", "simpo", "kto"
    ] = "sigmoid"
    """Loss of `task=dpo`. `orpo` and `simpo` need no reference; `kto` takes rated answers."""
    beta: Annotated[Real, Field(gt=0.0)] = 0.1
    """How closely the model stays at its reference; `ipo`: tau; `orpo`: weight of the odds."""
    label_smoothing: Annotated[Real, Field(ge=0.0, lt=0.5)] = 0.0
    """`simpo`: share of preferences that are taken to be the wrong way round."""
    simpo_gamma: NonNegativeFloat = 0.5
    """`simpo`: margin by which the chosen answer is to win."""
    cpo_alpha: NonNegativeFloat = 0.0
    """`simpo`: weight of the chosen answer's own loss (TRL's default is 1, the paper's 0)."""
    desirable_weight: NonNegativeFloat = 1.0
    """`kto`: weight of good answers' losses."""
    undesirable_weight: NonNegativeFloat = 1.0
    """`kto`: weight of bad answers' losses."""
    precompute_ref: bool = False
    """Compute the reference's log-probabilities once, before training; `tuner=full` needs it."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """`task=reward`: weight of a term that keeps the mean reward near zero (0.01 is usual)."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EmbeddingConfig:
    """`task=embedding`: one vector for a text, trained by InfoNCE."""

    pooling: Literal["auto", "mean", "last_token", "cls"] = "auto"
    """Tokens that make the vector; `auto` takes `mean` for encoders, `last_token` for decoders."""
    temperature: Annotated[Real, Field(gt=0.0)] = 0.05
    """Cosine similarities are divided by it."""
    query_prefix: Annotated[str, FREE_TEXT] = ""
    """Put before each anchor, as `query: ` for E5."""
    passage_prefix: Annotated[str, FREE_TEXT] = ""
    """Put before each positive and negative."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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
    max_steps: Annotated[Whole, Field(ge=-1), AfterValidator(_some_steps)] = -1
    """Optimizer steps; -1 goes by epochs."""
    per_device_train_batch_size: Positive = 1
    """Rows a micro-batch holds."""
    per_device_eval_batch_size: Positive = 1
    """Rows an evaluation batch holds."""
    gradient_accumulation_steps: Positive = 1
    """Micro-batches an optimizer step adds up."""
    learning_rate: Annotated[Annotated[Real, Field(gt=0.0)] | None, BeforeValidator(_auto)] = 1e-4
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
    seed: NonNegative = 42
    """Seed of initialisation, data order and dropout."""
    output_dir: PathText = "output"
    """Parent of run directories `<model>-<task>-<timestamp>`."""
    run_name: str | None = None
    """Name of the run directory, in place of the generated one."""
    export_dir: PathText | None = None
    """Where an export is written; set, training ends with an export. Left out: `<run>/export`."""
    export_quantization_bit: Literal[8, 16] | None = None
    """8 exports FP8, 16 merged BF16, as ms-swift writes it; set, training ends with an export."""
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

"""The groups of options that training reads: a dataclass each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from swiftfp8.config.kinds import (
    FREE_TEXT,
    STRICT,
    BelowOne,
    Fraction,
    LossWeight,
    Names,
    NonNegative,
    NonNegativeFloat,
    OnOff,
    Positive,
    Real,
    Shares,
    null_for_auto,
    whole_schedule_name,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
        Literal["assistant", "reasoning", "tool_call", "history", "prompt"], LossWeight
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
    num_proc: Annotated[Positive | None, BeforeValidator(null_for_auto)] = None
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
        BeforeValidator(whole_schedule_name),
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GuardConfig:
    """What happens when numbers go wrong."""

    on_nonfinite: Literal["stop", "ignore"] = "stop"
    """A loss or gradient norm that is not finite: stop with the layer named, or go on."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FreezeConfig:
    """What `tuner=freeze` trains."""

    last_layers: NonNegative = 2
    """How many of the last decoder layers are trained whole, norms and biases too."""
    modules: Names = Field(default_factory=list)
    """Name patterns (shell globs or dotted suffixes) of linears that are trained besides."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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

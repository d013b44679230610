"""The group of options that the export reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from swiftfp8.config.kinds import (
    STRICT,
    Fraction,
    Judging,
    Names,
    NonNegativeFloat,
    PathText,
    Positive,
    Real,
    Sizes,
    Smoke,
    Sources,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
    """Choose the rounding of every FP8 linear by its output on real rows (`fp8_block` and
    `compressed_tensors`)."""
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

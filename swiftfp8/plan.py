"""Every decision of a run, made once, printable, and with a reason that a user can read.

`build_plan(config, hardware, meta)` is pure: no weights, no device, no files. The stages after it
obey the plan and decide nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

FP8_RECIPES = ("mxfp8", "fp8_block", "fp8_current", "fp8_delayed")
HIGH_PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """An FP8 scaling recipe with its options, named as Transformer Engine names them."""

    recipe: str  # one of FP8_RECIPES
    fp8_format: str = "hybrid"  # "e4m3" or "hybrid"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    split_accumulator: bool = False
    backward_override: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What one linear gets. `name` is its full module path; shapes are (out, in) features."""

    name: str
    in_features: int
    out_features: int
    bias: bool
    precision: str  # a member of FP8_RECIPES or HIGH_PRECISIONS
    reason: str
    lora: bool
    trainable: bool  # the base weight itself is trained (tuner=full)
    count: int = 1  # matmuls of this shape that the name stands for


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """LoRA's shape. `targets` are full module names."""

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of a training step in GiB, by what holds it, and the batch that would fit."""

    weights: float
    transposes: float
    adapters: float
    optimizer: float
    gradients: float
    activations: float
    logits: float
    workspace: float
    available: float
    largest_micro_batch: int  # rows of max_length that fit; 0 where not even one does

    @property
    def total(self) -> float:
        """Sum of the parts, GiB."""
        return (
            self.weights
            + self.transposes
            + self.adapters
            + self.optimizer
            + self.gradients
            + self.activations
            + self.logits
            + self.workspace
        )


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A wish that was not granted: asked for, given instead, and why."""

    asked: str
    given: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the load, inject and train stages need to know.

    `compute_dtype` is what runs outside FP8: "bf16", "fp16" or "fp32". `recipe` and `backend`
    are None where nothing runs in FP8. `coverage` is the planned share of matmul FLOPs in FP8,
    among the planned linears (the head counted).
    """

    model_name: str
    hardware_name: str
    device: str
    asked_dtype: str
    compute_dtype: str
    recipe: RecipeOptions | None
    backend: str | None
    layers: tuple[LayerPlan, ...]
    lora: LoraPlan | None
    tuner: str
    gradient_checkpointing: bool
    loss_scaler: bool
    start_step: int
    fp8_token_multiple: int
    min_coverage: float
    coverage: float
    memory: MemoryEstimate
    fallbacks: tuple[Fallback, ...] = ()
    notes: tuple[str, ...] = ()

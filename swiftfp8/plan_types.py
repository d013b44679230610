"""What a plan is made of: plain, frozen values that every later stage reads."""

from __future__ import annotations

from dataclasses import dataclass

from swiftfp8.fusion import NO_FUSION, FusionPlan
from swiftfp8.ladder import Fallback
from swiftfp8.loss_plan import PLAIN_LOSS, LossPlan
from swiftfp8.memory import MemoryEstimate
from swiftfp8.tasks import Head

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
    lora_rank: int | None = None  # where it is another than LoraPlan.rank

    @property
    def flops(self) -> int:
        """Multiply-adds per token: its weight in coverage."""
        return self.in_features * self.out_features * self.count


@dataclass(frozen=True, kw_only=True)
class LoraPlan:
    """LoRA's shape. `targets` are full module names.

    `modules_to_save` are trained whole beside it; `task_type` is PEFT's.
    """

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()
    task_type: str = "CAUSAL_LM"
    init: str = "default"  # or "gaussian", "pissa"
    use_dora: bool = False
    plus_ratio: float = 1.0  # B's learning rate over A's
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the load, inject and train stages need to know.

    `compute_dtype` is what runs outside FP8: "bf16", "fp16" or "fp32". `recipe` and `backend`
    are None where nothing runs in FP8. `coverage` is the planned share of matmul FLOPs in FP8
    among all linears, the head and routers counted; `decoder_coverage` leaves the head out.
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
    tuner: str  # "lora", "freeze" or "full"
    gradient_checkpointing: str  # "none", "selective" or "full"
    loss_scaler: bool
    start_step: int
    fp8_token_multiple: int
    min_coverage: float
    coverage: float
    memory: MemoryEstimate
    checkpointing_reason: str = ""
    loss: LossPlan = PLAIN_LOSS
    fusion: FusionPlan = NO_FUSION
    decoder_coverage: float = 0.0
    master_weights: bool = False  # BF16 weights are trained on exact FP32 masters
    state_dtype: str = "fp32"  # of Adam's moments beside the masters: "fp32" or "bf16"
    cpu_threads: int | None = None  # None leaves torch's choice
    trained: tuple[str, ...] = ()  # modules that tuner=freeze trains, with all below them
    task: str = "sft"
    head: Head | None = None  # of task=seq_cls and reward
    head_modules: tuple[str, ...] = ()  # top-level modules that are it
    pooling: str | None = None  # of task=embedding
    encoder: bool = False  # every token sees all others, so padding has to be masked
    fallbacks: tuple[Fallback, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def weight_dtype(self) -> str:
        """What the weights are loaded in: FP32 masters where FP16 would train them all."""
        scaled = self.compute_dtype == "fp16" and self.tuner != "lora"
        return "fp32" if scaled else self.compute_dtype

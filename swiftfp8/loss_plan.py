"""How the loss is computed: from whole logits, or in chunks that are never held together.

The chunked loss (train/losses.py) replaces the model's own last steps, so it is right only where
the logits are the head times the last hidden state and nothing else. `auto` takes it for the
architectures that are known to be of that form; `on` for every one in which nothing speaks against
it; and the plan says why where it is not taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from swiftfp8.errors import SwiftFP8Error
from swiftfp8.models.meta import ModelMeta

# Elements of logits that are held at once. On a CPU several float32 copies of them live together.
CHUNK_ELEMENTS = {"cuda": 2**28, "cpu": 2**24}
# On a GPU: every chunk adds to the whole of a trained head's gradient. Fewer, larger ones.
TRAINED_HEAD_CHUNK = 8
# transformers' models whose logits are lm_head(last hidden state); each is tested to be.
PLAIN_HEADS = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Exaone4", "Gemma", "Gemma3", "Glm", "Glm4", "GptOss", "Llama", "Ministral", "Mistral",
        "Mixtral", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3",
        "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2",
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """Whether the loss is fused with the head, in chunks, and why or why not."""

    fused: bool
    reason: str


PLAIN_LOSS = LossPlan(fused=False, reason="not planned")


def plan_loss(
    wanted: str, meta: ModelMeta, *, head_has_lora: bool, wordless: str | None = None
) -> tuple[LossPlan, list[SwiftFP8Error]]:
    """The choice for `train.fused_loss=wanted`, and the problem where `on` can't be had.

    `wordless` says why there are no logits over words, where the task has none.
    """
    if wanted == "off":
        return LossPlan(fused=False, reason="train.fused_loss=off"), []
    reason = wordless or ("its head has LoRA" if head_has_lora else meta.unfused_loss)
    if reason is not None:
        problem = SwiftFP8Error(
            f"the loss of {meta.architecture} can't be fused with its head: {reason}",
            where="train.fused_loss=on",
            fix="set train.fused_loss=auto",
        )
        return LossPlan(fused=False, reason=reason), [problem] if wanted == "on" else []
    if wanted == "auto" and meta.architecture not in PLAIN_HEADS:
        reason = (
            f"whether {meta.architecture} changes its logits after the head is not known; "
            "train.fused_loss=on takes the fused loss all the same"
        )
        return LossPlan(fused=False, reason=reason), []
    return LossPlan(fused=True, reason="the logits are made and used in chunks, never whole"), []


def chunk_rows(vocabulary: int, elements: int) -> int:
    """Tokens whose logits are held at once: a power of two, of at most `elements` in all."""
    return max(128, 1 << (elements // vocabulary).bit_length() - 1)

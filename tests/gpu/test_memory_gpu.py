"""Peaks of a real step against the plan's estimate, and recomputation against none."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from swiftfp8.inject import forward_context, inject_precision
from swiftfp8.plan import Plan
from swiftfp8.train.losses import fuse_loss
from tests.plan_kit import decoder_meta, plan_for

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 4, 2048
SHAPE: dict[str, Any] = {"hidden": 3584, "intermediate": 18944, "layers": 4, "vocab": 32000}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, and how far its peak may lie from the estimate."""

    backend: str | None
    checkpointing: str
    fused_loss: str = "on"
    head: str = "bf16"
    within: float = 0.15


CASES = [
    *(Case(backend="torch", checkpointing=mode) for mode in ("none", "selective", "full")),
    Case(backend="torch", checkpointing="none", head="fp8"),
    *(Case(backend=None, checkpointing=mode) for mode in ("none", "selective", "full")),
    Case(backend=None, checkpointing="none", fused_loss="off"),
    *(Case(backend="te", checkpointing=mode) for mode in ("none", "full")),
]


def make_plan(case: Case) -> Plan:
    meta = decoder_meta(**SHAPE, heads=28, kv_heads=4, tied=False)
    return plan_for(
        "h200",
        meta,
        dtype="fp8" if case.backend else "bf16",
        precision={"backend": case.backend or "auto", "head": case.head},
        lora_rank=16,
        per_device_train_batch_size=ROWS,
        max_length=LENGTH,
        gradient_checkpointing=case.checkpointing,
        train={"fused_loss": case.fused_loss, "cuda_graphs": False},
    )


def make_model(plan: Plan) -> Any:
    config = Qwen2Config(
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["intermediate"],
        num_hidden_layers=SHAPE["layers"],
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=SHAPE["vocab"],
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model = inject_precision(model, plan, "cuda").train()
    if plan.loss.fused:
        assert fuse_loss(model) is None
    return model


def losses_of(case: Case, steps: int = 2) -> tuple[list[float], float]:
    """Losses of some steps, and the peak of allocated memory in GiB."""
    plan = make_plan(case)
    model = make_model(plan)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    ids = torch.randint(0, SHAPE["vocab"], (ROWS, LENGTH), device="cuda")
    losses = []
    for step in range(steps):
        if step == steps - 1:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16), forward_context(plan):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated() / 2**30
    del model, trained, optimizer, loss
    gc.collect()
    torch.cuda.empty_cache()
    return losses, peak


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_estimate_is_near_the_peak(case: Case) -> None:
    memory = make_plan(case).memory
    _, peak = losses_of(case)
    assert memory.total - memory.workspace == pytest.approx(peak, rel=case.within)


@pytest.mark.parametrize("backend", ["torch", None])
def test_recomputation_changes_no_loss(backend: str | None) -> None:
    """Attention's backward sums in any order, so the second step's loss may differ a little."""
    none, *others = (
        losses_of(Case(backend=backend, checkpointing=mode))[0]
        for mode in ("none", "selective", "full")
    )
    for other in others:
        assert other[0] == none[0]
        assert other[1] == pytest.approx(none[1], rel=1e-3)

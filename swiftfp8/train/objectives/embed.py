"""`task=embedding`: InfoNCE. A text's vector is to be nearest to that of its positive.

    loss_i = -log ( exp(a_i·p_i / τ) / Σ_c exp(a_i·c / τ) )

a, p and c are unit vectors; the candidates c are all positives and all negatives of the batch, less
those that are word for word p_i. van den Oord et al. 2018, arXiv 1807.03748.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from swiftfp8.train.objectives._objective import Batch, Outcome, Sums, run_model
from swiftfp8.train.objectives.reward import means


def pool(hidden_BTK: torch.Tensor, mask_BT: torch.Tensor, pooling: str) -> torch.Tensor:
    """Unit vectors [B, K] in float32, of `mean`, `last_token` or `cls` of the unmasked tokens."""
    hidden = hidden_BTK.float()
    if pooling == "cls":
        vectors = hidden[:, 0]
    elif pooling == "last_token":
        last = mask_BT.sum(dim=1) - 1
        vectors = hidden[torch.arange(len(hidden), device=hidden.device), last]
    else:
        assert pooling == "mean", pooling
        weights = mask_BT[..., None].to(hidden.dtype)
        vectors = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    return functional.normalize(vectors, dim=-1)


class Embedding:
    """Objective of an embedding model."""

    def __init__(self, pooling: str, temperature: float, *, masks: bool = True) -> None:
        self._pooling = pooling
        self._temperature = temperature
        self._masks = masks

    def rows(self, batch: Batch) -> int:
        """Anchors."""
        return len(batch["same"])

    def run(self, model: Any, batch: Batch) -> Outcome:
        """Anchors, positives and negatives in one forward pass."""
        rows = self.rows(batch)
        hidden = run_model(model, batch, masks=self._masks).last_hidden_state
        vectors = pool(hidden, batch["attention_mask"], self._pooling)
        similarity = vectors[:rows] @ vectors[rows:].t()
        wanted = torch.arange(rows, device=similarity.device)
        own = functional.one_hot(wanted, similarity.shape[1]).bool()
        logits = (similarity / self._temperature).masked_fill(batch["same"] & ~own, -torch.inf)
        loss = functional.cross_entropy(logits, wanted, reduction="sum")
        return Outcome(loss=loss, sums=self._sums(logits.detach(), similarity.detach(), wanted))

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`accuracy` and `mrr` among the batch's candidates, `similarity` to the positive."""
        return means(sums)

    def _sums(self, logits: torch.Tensor, similarity: torch.Tensor, wanted: torch.Tensor) -> Sums:
        right = logits.gather(1, wanted[:, None])
        rank = (logits > right).sum(dim=1) + 1
        return {
            "rows": torch.as_tensor(float(len(wanted)), device=wanted.device),
            "accuracy": (rank == 1).sum(),
            "mrr": (1.0 / rank).sum(),
            "similarity": similarity.gather(1, wanted[:, None]).sum(),
        }

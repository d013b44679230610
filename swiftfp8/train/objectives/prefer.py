"""`task=dpo`: losses on the log-probabilities of answers, against the model's own beginning.

Chosen and rejected answers go through the model together. The reference is the same model with its
adapter off, run before and without a graph, so that its activations are gone when the graph is
built; or log-probabilities that were computed before training (`ref_logps` of a batch, and
`ref_logps_high` for the steps before FP8 is switched on).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from swiftfp8.tasks import WITHOUT_REFERENCE
from swiftfp8.train.losses import IGNORED
from swiftfp8.train.objectives._objective import Batch, Outcome, Sums
from swiftfp8.train.objectives.reward import means, preference_sums
from swiftfp8.train.preference._kto import kto_losses
from swiftfp8.train.preference._pairs import Pairs, find_loss, reward_pair

if TYPE_CHECKING:
    from swiftfp8.config.schema import RlhfConfig


class Preferring:
    """Objective of losses on pairs: chosen answers above rejected ones in a batch of 2B rows."""

    def __init__(self, model: Any, options: RlhfConfig) -> None:
        self._model = model
        self._options = options
        self._loss = find_loss(options.loss_type)
        self._nll = getattr(self._loss, "NLL", None)
        self._compares = options.loss_type not in WITHOUT_REFERENCE

    def rows(self, batch: Batch) -> int:
        """Pairs."""
        return len(batch["input_ids"]) // 2

    def run(self, model: Any, batch: Batch) -> Outcome:
        """The reference's forward pass where it has to run, then the model's."""
        reference = _reference(self._model, model, batch) if self._compares else (None, None)
        scored = batch["labels"]
        if self._nll == "prompt and answer":
            scored = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        log_probs = _log_probs(model, batch, scored)
        answers = batch["labels"][:, 1:] != IGNORED
        chosen, rejected = (log_probs * answers).sum(dim=1).chunk(2)
        chosen_tokens, rejected_tokens = answers.sum(dim=1).chunk(2)
        pairs = Pairs(
            chosen=chosen,
            rejected=rejected,
            chosen_tokens=chosen_tokens,
            rejected_tokens=rejected_tokens,
            ref_chosen=reference[0],
            ref_rejected=reference[1],
            nll=self._mean_nll(log_probs, scored),
        )
        loss = self._loss.losses(pairs, self._options).sum()
        sums = preference_sums(*reward_pair(self._loss, pairs, self._options))
        sums["logps/chosen"] = chosen.detach().sum()
        sums["logps/rejected"] = rejected.detach().sum()
        return Outcome(loss=loss, sums=sums)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """TRL's: `rewards/...` and `logps/...`."""
        return means(sums)

    def _mean_nll(self, log_probs: torch.Tensor, scored: torch.Tensor) -> torch.Tensor | None:
        if self._nll is None:
            return None
        chosen = log_probs.chunk(2)[0]
        count = (scored[:, 1:].chunk(2)[0] != IGNORED).sum()
        return -chosen.sum() / count


class Rating:
    """Objective of KTO: B answers, and below them B answers of other rows (see RatedRows)."""

    def __init__(self, model: Any, options: RlhfConfig) -> None:
        self._model = model
        self._options = options

    def rows(self, batch: Batch) -> int:
        """Rated answers."""
        return len(batch["good"])

    def run(self, model: Any, batch: Batch) -> Outcome:
        """Three passes without a graph (two where the reference is known), and the answers' own."""
        reference, kl_reference = _reference(self._model, model, batch)
        answers, others = _halves(batch)
        with torch.no_grad():
            kl = _log_probs(model, others, others["labels"]).sum(dim=1)
        policy = _log_probs(model, answers, answers["labels"]).sum(dim=1)
        good = batch["good"]
        ratio = policy - reference
        losses, z = kto_losses(ratio, kl - kl_reference, good, self._options)
        return Outcome(loss=losses.sum(), sums=self._sums(ratio.detach(), policy, good, z))

    def metrics(self, sums: Sums) -> dict[str, float]:
        """TRL's: `rewards/...`, each over the answers of its kind, `logps/...` and `kl`."""
        rows = {True: float(sums["good"]), False: float(sums["rows"] - sums["good"])}
        found = {"kl": float(sums["kl"]) / float(sums["rows"])}
        for good, side in ((True, "chosen"), (False, "rejected")):
            for kind in ("rewards", "logps"):
                if rows[good]:
                    found[f"{kind}/{side}"] = float(sums[f"{kind}/{side}"]) / rows[good]
        if all(rows.values()):
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found

    def _sums(
        self, ratio: torch.Tensor, policy: torch.Tensor, good: torch.Tensor, z: torch.Tensor
    ) -> Sums:
        rewards, logps = self._options.beta * ratio, policy.detach()
        rows = torch.as_tensor(float(len(good)), device=good.device)
        return {
            "rows": rows,
            "good": good.sum(),
            "kl": z * rows,
            "rewards/chosen": (rewards * good).sum(),
            "rewards/rejected": (rewards * ~good).sum(),
            "logps/chosen": (logps * good).sum(),
            "logps/rejected": (logps * ~good).sum(),
        }


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """The model as it was before training: no adapter, no dropout, no graph, nothing remembered."""
    from swiftfp8 import inject

    training = model.training
    scaling = inject.scaling_state(model)
    model.eval()
    try:
        with torch.no_grad(), _adapter_off(model):
            yield
    finally:
        model.train(training)
        if scaling:
            inject.load_scaling_state(model, scaling)


def answer_log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """Log-probability of each sequence's labels, [sequences]."""
    return _log_probs(model, batch, batch["labels"]).sum(dim=1)


def _reference(inner: Any, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's log-probabilities of the batch's two halves, [B] each."""
    from swiftfp8 import inject

    if "ref_logps" in batch:
        # Before FP8 is switched on, the reference is what the model was without it.
        early = "ref_logps_high" in batch and not inject.fp8_enabled(inner)
        first, second = batch["ref_logps_high" if early else "ref_logps"].chunk(2)
        return first, second
    assert hasattr(inner, "disable_adapter"), "the plan asks for precompute_ref with tuner=full"
    with as_reference(inner):
        first, second = answer_log_probs(model, batch).chunk(2)
    return first, second


def _adapter_off(model: Any) -> Any:
    return model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()


def _log_probs(model: Any, batch: Batch, labels: torch.Tensor) -> torch.Tensor:
    """No mask: causal attention sees no padding on the right."""
    log_probs: torch.Tensor = model(input_ids=batch["input_ids"], score_labels=labels)
    return log_probs


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    names = ("input_ids", "attention_mask", "labels")
    rows = len(batch["input_ids"]) // 2
    return {n: batch[n][:rows] for n in names}, {n: batch[n][rows:] for n in names}

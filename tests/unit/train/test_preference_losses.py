"""Each loss on preferences against TRL's own code, on the same log-probabilities."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftfp8.config.schema import RlhfConfig
from swiftfp8.train.preference._kto import kto_losses
from swiftfp8.train.preference._pairs import Pairs, find_loss, reward_pair

ON_PAIRS = ("sigmoid", "hinge", "ipo", "apo_zero", "apo_down")
LENGTHS = {"chosen": [3, 5, 2, 7], "rejected": [4, 1, 6, 2]}
WIDTH = 9  # predicted positions of a row; the first is the prompt's


def token_log_probs(seed: int) -> torch.Tensor:
    """[2B, WIDTH]: chosen rows, then rejected ones."""
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(8, WIDTH, generator=generator, dtype=torch.float64)


def answer_mask() -> torch.Tensor:
    lengths = torch.tensor(LENGTHS["chosen"] + LENGTHS["rejected"])
    places = torch.arange(WIDTH)
    return (places >= 1) & (places < 1 + lengths[:, None])


def whole_mask() -> torch.Tensor:
    lengths = torch.tensor(LENGTHS["chosen"] + LENGTHS["rejected"])
    return torch.arange(WIDTH) < 1 + lengths[:, None]


def make_pairs(log_probs: torch.Tensor, **changes: Any) -> Pairs:
    sums = (log_probs * answer_mask()).sum(1)
    reference = (token_log_probs(2) * answer_mask()).sum(1)
    values = {
        "chosen": sums[:4],
        "rejected": sums[4:],
        "chosen_tokens": torch.tensor(LENGTHS["chosen"]),
        "rejected_tokens": torch.tensor(LENGTHS["rejected"]),
        "ref_chosen": reference[:4],
        "ref_rejected": reference[4:],
    }
    return Pairs(**{**values, **changes})


class Accelerator:
    device = torch.device("cpu")
    num_processes = 1

    def gather(self, value):
        return value

    gather_for_metrics = gather


def trl_inputs() -> dict[str, torch.Tensor]:
    """TRL's batch: its masks have one position more than there are predictions."""
    reference = (token_log_probs(2) * answer_mask()).sum(1)
    mask = torch.cat([torch.zeros(8, 1, dtype=torch.long), answer_mask().long()], dim=1)
    return {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference[:4],
        "ref_rejected_logps": reference[4:],
    }


def trl_model(log_probs: torch.Tensor):
    """A model as TRL's fused head answers: log-probabilities that are 0 outside the answers."""
    masked = log_probs * answer_mask()
    return lambda **_: SimpleNamespace(
        log_probs=masked,
        entropy=torch.zeros_like(masked),
        mean_logits=torch.zeros_like(masked),
        is_top1=torch.zeros_like(masked, dtype=torch.bool),
        aux_loss=None,
    )


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("name", ON_PAIRS)
def test_a_loss_on_pairs_is_trl_s(name, beta):
    dpo_trainer = pytest.importorskip("trl.trainer.dpo_trainer")
    ours, theirs = (token_log_probs(1).requires_grad_() for _ in range(2))
    options = RlhfConfig(loss_type=name, beta=beta)
    loss = find_loss(name).losses(make_pairs(ours), options).mean()
    loss.backward()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    expected = dpo_trainer.DPOTrainer._compute_loss(
        trainer, trl_model(theirs), trl_inputs(), return_outputs=False
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-15)
    metrics = trainer._metrics["train"]
    chosen, rejected = reward_pair(find_loss(name), make_pairs(ours), options)
    assert float(chosen.mean()) == pytest.approx(metrics["rewards/chosen"][0])
    assert float((chosen - rejected).mean()) == pytest.approx(metrics["rewards/margins"][0])
    assert float((chosen > rejected).double().mean()) == metrics["rewards/accuracies"][0]


def test_orpo_is_trl_s():
    orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    log_probs = token_log_probs(1)
    nll = -(log_probs * whole_mask())[:4].sum() / whole_mask()[:4].sum()
    ours = find_loss("orpo").losses(make_pairs(log_probs, nll=nll), RlhfConfig(beta=0.3)).mean()
    means = (log_probs * answer_mask()).sum(1) / answer_mask().sum(1)
    trainer = SimpleNamespace(beta=0.3, accelerator=Accelerator())
    losses, chosen, _, _, _ = orpo.ORPOTrainer.odds_ratio_loss(trainer, means[:4], means[4:])
    assert float(ours) == pytest.approx(float(nll - losses.mean()), rel=1e-6)
    rewards = reward_pair(find_loss("orpo"), make_pairs(log_probs), RlhfConfig(beta=0.3))
    assert torch.allclose(rewards[0].float(), chosen.float())


@pytest.mark.parametrize(("alpha", "smoothing"), [(0.0, 0.0), (1.0, 0.2)])
def test_simpo_is_trl_s(alpha, smoothing):
    cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    log_probs = token_log_probs(1)
    nll = -(log_probs * answer_mask())[:4].sum() / answer_mask()[:4].sum()
    options = RlhfConfig(beta=2.0, simpo_gamma=1.2, label_smoothing=smoothing, cpo_alpha=alpha)
    ours = find_loss("simpo").losses(make_pairs(log_probs, nll=nll), options).mean()
    means = (log_probs * answer_mask()).sum(1) / answer_mask().sum(1)
    trainer = SimpleNamespace(
        beta=2.0,
        alpha=0.0,
        simpo_gamma=1.2,
        label_smoothing=smoothing,
        loss_type="simpo",
        accelerator=Accelerator(),
    )
    losses, _, _ = cpo.CPOTrainer.cpo_loss(trainer, means[:4], means[4:])
    assert float(ours) == pytest.approx(float(losses.mean() + alpha * nll), rel=1e-12)


@pytest.mark.parametrize("good", [[True, False, True, False], [True] * 4, [False] * 4])
def test_kto_is_trl_s(good):
    kto_trainer = pytest.importorskip("trl.trainer.kto_trainer")
    policy, kl_policy = token_log_probs(1), token_log_probs(5)
    mask = torch.cat([torch.zeros(4, 1, dtype=torch.long), answer_mask()[:4].long()], dim=1)
    sums = [(x * answer_mask())[:4].sum(1) for x in (policy, token_log_probs(2), kl_policy)]
    options = RlhfConfig(beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    kl_reference = sums[2] - torch.tensor([0.5, -0.2, 1.0, 0.3])
    ours, z = kto_losses(sums[0] - sums[1], sums[2] - kl_reference, torch.tensor(good), options)
    masked = (policy * answer_mask())[:4]
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        calculate_KL=True,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.4,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        _compute_kl_logps=lambda model, batch: sums[2],
    )
    expected = kto_trainer.KTOTrainer._compute_loss(
        trainer,
        lambda **_: SimpleNamespace(
            log_probs=masked,
            entropy=torch.zeros_like(masked),
            mean_logits=torch.zeros_like(masked),
            is_top1=torch.zeros_like(masked, dtype=torch.bool),
        ),
        {
            "input_ids": torch.ones_like(mask),
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "label": torch.tensor(good),
            "ref_logps": sums[1],
            "ref_KL_logps": kl_reference,
        },
        return_outputs=False,
    )
    assert float(z) == pytest.approx(0.4)
    assert float(ours.mean()) == pytest.approx(float(expected), rel=1e-6)


def test_losses_by_hand():
    """One pair: log-ratios 0.5 and -0.5 at beta 1, answers of two tokens."""
    pairs = make_pairs(
        token_log_probs(1),
        chosen=torch.tensor([-1.0]),
        rejected=torch.tensor([-3.0]),
        chosen_tokens=torch.tensor([2]),
        rejected_tokens=torch.tensor([2]),
        ref_chosen=torch.tensor([-1.5]),
        ref_rejected=torch.tensor([-2.5]),
        nll=torch.tensor(0.5),
    )

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    odds = math.log(math.exp(-0.5) / (1 - math.exp(-0.5)))
    odds -= math.log(math.exp(-1.5) / (1 - math.exp(-1.5)))
    expected = {
        "sigmoid": -math.log(sigmoid(1.0)),
        "hinge": 0.0,
        "ipo": (0.5 - 0.5) ** 2,
        "apo_zero": 1 - sigmoid(0.5) + sigmoid(-0.5),
        "apo_down": sigmoid(0.5) + 1 - sigmoid(1.0),
        "orpo": 0.5 - math.log(sigmoid(odds)),
        "simpo": -math.log(sigmoid(-0.5 + 1.5 - 0.5)),
    }
    for name, value in expected.items():
        (loss,) = find_loss(name).losses(pairs, RlhfConfig(beta=1.0)).tolist()
        assert loss == pytest.approx(value, abs=1e-6), name


def test_orpo_is_finite_where_an_answer_is_certain():
    pairs = make_pairs(token_log_probs(1), chosen=torch.zeros(4), nll=torch.tensor(0.0))
    assert torch.isfinite(find_loss("orpo").losses(pairs, RlhfConfig())).all()

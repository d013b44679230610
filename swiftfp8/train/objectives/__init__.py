"""What each task trains and measures, a file each; `build_objective` finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swiftfp8.tasks import TASKS, rates_answers
from swiftfp8.train.objectives._objective import Objective, Outcome, Sums, finish, merge

if TYPE_CHECKING:
    from swiftfp8.config.schema import Config
    from swiftfp8.plan import Plan

__all__ = ["Objective", "Outcome", "Sums", "build_objective", "finish", "merge"]


def build_objective(model: Any, plan: Plan, config: Config) -> Objective | None:
    """The task's objective; None for language modelling, whose loss is the model's own."""
    if TASKS[plan.task].packs:
        return None
    if plan.task == "seq_cls":
        from swiftfp8.train.objectives.classify import Classification

        assert plan.head is not None and plan.head.problem_type is not None
        return Classification(plan.head.problem_type, plan.head.num_labels, masks=plan.encoder)
    if plan.task == "reward":
        from swiftfp8.train.objectives.reward import Reward

        return Reward(config.rlhf.center_rewards_coefficient, masks=plan.encoder)
    if plan.task == "embedding":
        from swiftfp8.train.objectives.embed import Embedding

        assert plan.pooling is not None
        return Embedding(plan.pooling, config.embedding.temperature, masks=plan.encoder)
    from swiftfp8.train.objectives.prefer import Preferring, Rating

    return (Rating if rates_answers(config) else Preferring)(model, config.rlhf)

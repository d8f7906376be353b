"""The critic as a scorer, and its part of a step: the update of what it expects.

Shapes: R trained tokens of a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.scorer import WorkersScorer
from hybrid_gkd.types import Sample
from hybrid_gkd.workers.batches import Batches, mean_metrics

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup


class CriticTurn:
    """What the loop asks of the critic."""

    def __init__(self, config: Config, group: WorkerGroup, clock: Clock):
        self.group, self.clock = group, clock
        self.batches = Batches(config, config.resolved_critic, group)
        self.values = WorkersScorer("values", group.compute_values, self.batches)
        """The return that it expects before each trained token."""

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """Learn the returns of the samples; metrics. Raises as an update of the actor."""
        with self.clock.span("update_critic"):
            updates = self.group.update_critic(self.batches.epochs(samples))
        return mean_metrics(updates) | value_metrics(samples)


def value_metrics(samples: list[Sample]) -> dict[str, float]:
    """How well the values before an update have foretold the returns, over all tokens.

    The explained variance is 1 - Var(R - V) / Var(R), which is left out where all returns are equal.
    """
    values, returns = (
        np.concatenate([sample.array(name).astype(np.float64) for sample in samples])
        for name in ("values", "returns")
    )
    metrics = {"critic/values/mean": float(values.mean()), "critic/returns/mean": float(returns.mean())}
    if returns.var() > 0:
        metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / returns.var())
    return metrics

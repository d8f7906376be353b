"""The critic's part of a training step: values as a scorer, and the value update.

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


class CriticStage:
    """Computes values with the critic and updates it."""

    def __init__(self, config: Config, group: WorkerGroup, clock: Clock):
        self.group, self.clock = group, clock
        self.batches = Batches(config, config.resolved_critic, group)
        self.values = WorkersScorer("values", group.compute_values, self.batches)
        """Scorer of the expected return before each trained token."""

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """Fit the critic to the returns of the samples; return metrics. Raises the errors of an actor update."""
        with self.clock.span("update_critic"):
            updates = self.group.update_critic(self.batches.epochs(samples))
        return mean_metrics(updates) | value_metrics(samples)


def value_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return means of values and returns over all tokens, and the explained variance of the values before the update.

    The explained variance is 1 - Var(R - V) / Var(R); it is omitted if all returns are equal up to rounding.
    """
    values, returns = (
        np.concatenate([sample.array(name).astype(np.float64) for sample in samples])
        for name in ("values", "returns")
    )
    metrics = {"critic/values/mean": float(values.mean()), "critic/returns/mean": float(returns.mean())}
    # Returns are advantages plus values: without rewards, and with gamma below 1, about 1e-17.
    if returns.std() > np.finfo(np.float32).eps * np.abs([values, returns]).max():
        metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / returns.var())
    return metrics

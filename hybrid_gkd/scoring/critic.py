"""The critic's part of a step: values of a rollout's responses, and the update of what it expects.

Shapes: R response tokens of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.types import Rollout, TrainSequence
from hybrid_gkd.workers.batches import Batches

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup


class CriticTurn:
    """What the loop asks of the critic."""

    def __init__(self, config: Config, group: WorkerGroup, clock: Clock):
        self.group, self.clock = group, clock
        self.batches = Batches(config, config.resolved_critic, group)

    def values(self, rollout: Rollout) -> list[np.ndarray]:
        """Of each response, float32 [R]: the return that the critic expects before each of its tokens."""
        sequences = [TrainSequence(sequence=sequence) for sequence in rollout.sequences]
        with self.clock.span("values"):
            found = self.group.compute_values([tuple(share) for share in self.batches.plan(sequences)])
        return [found[sequence.index] for sequence in rollout.sequences]

    def update(self, sequences: list[TrainSequence]) -> dict[str, float]:
        """Learn the returns of the sequences; metrics. Raises as an update of the actor."""
        with self.clock.span("update_critic"):
            updates = self.group.update_critic(self.batches.epochs(sequences))
        metrics = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
        return metrics | {"critic/lr": updates[-1]["critic/lr"]} | value_metrics(sequences)


def value_metrics(sequences: list[TrainSequence]) -> dict[str, float]:
    """How well the values before an update have foretold the returns, over all tokens.

    The explained variance is 1 - Var(R - V) / Var(R), which is left out where all returns are equal.
    """
    values, returns = (
        np.concatenate([np.asarray(getattr(item, name), np.float64) for item in sequences])
        for name in ("values", "returns")
    )
    metrics = {"critic/values/mean": float(values.mean()), "critic/returns/mean": float(returns.mean())}
    if returns.var() > 0:
        metrics["critic/vf_explained_var"] = float(1 - (returns - values).var() / returns.var())
    return metrics

"""Dynamic sampling: drop groups with equal rewards and refill the batch (`algorithm.filter_groups`).

A group is the n completions of a prompt. If all of them have the same reward, their group-relative advantages are 0
and the group is not informative. Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import abc, defaultdict
from collections.abc import Callable

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.scoring.rewards import RewardScorer
from hybrid_gkd.types import Pair, Rollout, Sample, Task, with_tasks

logger = logging.getLogger(__name__)

GROUP_METRICS: dict[str, Callable[[RewardScorer, list[Pair]], list[float]]] = {
    "acc": RewardScorer.accuracies, "score": RewardScorer.scores, "seq_reward": RewardScorer.rewards,
}  # fmt: skip
"""Functions that return one number per sample, by the value of `algorithm.filter_groups.metric`."""


def informative_groups(samples: abc.Sequence[Sample], values: list[float]) -> list[tuple[int, int]]:
    """Return the groups (`SampleId.group`) whose values are not all the same, in the order of the samples."""
    groups: defaultdict[tuple[int, int], set[float]] = defaultdict(set)
    for sample, value in zip(samples, values, strict=True):
        groups[sample.id.group].add(value)
    return [group for group, found in groups.items() if len(found) > 1]


class GroupCollector:
    """Collects the informative groups of several generation batches until they fill a training batch.

    Groups are kept in the order of their prompts. Those beyond a full batch are dropped.
    """

    def __init__(self, config: Config, scorer: RewardScorer, step: int):
        self.section, self.scorer, self.step = config.algorithm.filter_groups, scorer, step
        self.size = config.data.train_batch_size
        self._batches: list[Rollout] = []
        self._num_informative = 0
        self._rewards: list[float] = []
        """Rewards of all completions, including those of dropped groups."""
        self._num_groups = 0
        """Number of groups generated."""
        self._tasks: list[Task] = []
        self._samples: list[Sample] = []
        self._greedy: list[Sample] = []

    @property
    def is_full(self) -> bool:
        return len(self._tasks) == self.size

    def add(self, batch: Rollout) -> list[Sample]:
        """Add a generation batch; return the samples of it that are kept.

        Raises TrainingError: this was the last batch allowed and there are too few informative groups; otherwise the
        errors of the scorer.
        """
        pairs, count = with_tasks(batch.tasks, (*batch.samples, *batch.greedy)), len(batch.samples)
        self._rewards += self.scorer.rewards(pairs)[:count]
        values = GROUP_METRICS[self.section.metric](self.scorer, pairs)[:count]
        self._batches.append(batch)
        found = informative_groups(batch.samples, values)
        self._num_informative += len(found)
        self._num_groups += len(batch.tasks)
        chosen = found[: self.size - len(self._tasks)]
        rows = {row for _, row in chosen}
        kept = [sample for sample in batch.samples if sample.id.row in rows]
        self._tasks += [task for task in batch.tasks if task.index in rows]
        self._greedy += [sample for sample in batch.greedy if sample.id.row in rows]
        self._samples += kept
        if not self.is_full:
            self._check_bound()
        return kept

    def rollout(self) -> Rollout:
        """Return the full batch as one rollout."""
        metrics = {
            "training/num_gen_batches": float(len(self._batches)),
            "training/groups_with_signal": self._num_informative / self._num_groups,
            "reward/all_groups": float(np.mean(self._rewards)),
        }
        return dataclasses.replace(
            self._batches[0], tasks=tuple(self._tasks), samples=tuple(self._samples), greedy=tuple(self._greedy),
            extra_batches=self._batches[-1].extra_batches, metrics=metrics,
        )

    def _check_bound(self) -> None:
        """Log that another generation batch is needed. Raises TrainingError: the limit is reached."""
        done, limit = len(self._batches), self.section.max_num_gen_batches
        found = (
            f"{self._num_informative} of {self._num_groups} groups have completions that differ in "
            f"{self.section.metric} (algorithm.filter_groups.metric) after {done} of at most {limit} generation "
            f"batches; a training batch needs {self.size}"
        )
        if done < limit:
            logger.info("step %d: %s", self.step, found)
            return
        raise TrainingError(
            f"step {self.step}: {found} (algorithm.filter_groups.max_num_gen_batches={limit}). The mean reward is "
            f"{np.mean(self._rewards):.3g}: prompts may be too hard or too easy. Use other prompts, more completions "
            "per prompt (actor_rollout_ref.rollout.n) or a higher temperature, raise max_num_gen_batches, or set "
            "algorithm.filter_groups.enable=false to train on all groups"
        )

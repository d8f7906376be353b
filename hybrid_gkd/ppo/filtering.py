"""Dynamic sampling: groups without a signal are left out, and the batch is refilled (`algorithm.filter_groups`).

A group is the n responses to a prompt. Where all of them have the same reward, their advantages relative to each other
are 0. Source: DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.errors import TrainingError
from hybrid_gkd.ppo.learning_signal import answers_to_score
from hybrid_gkd.scoring.rewards import Pair, Scorer
from hybrid_gkd.types import Prompt, Rollout, Sequence

logger = logging.getLogger(__name__)

GROUP_METRICS: dict[str, Callable[[Scorer, list[Pair]], list[float]]] = {
    "acc": Scorer.accuracies, "score": Scorer.scores, "seq_reward": Scorer.rewards,
}  # fmt: skip
"""By `algorithm.filter_groups.metric`: of responses to their prompts, a number for each."""


def groups_with_signal(values: list[float], n: int) -> list[int]:
    """Positions of the groups whose values are not all the same; sample j of group i is at i * n + j."""
    groups = np.array(values, np.float64).reshape(-1, n)
    return [int(position) for position in np.flatnonzero(groups.min(axis=1) < groups.max(axis=1))]


class Refill:
    """The rollout of a training step: the groups with a signal of as many generation batches as it takes.

    They are kept in the order in which their prompts were drawn. Those beyond a full batch are not trained on.
    """

    def __init__(self, config: Config, scorer: Scorer, step: int):
        self.section, self.scorer, self.step = config.algorithm.filter_groups, scorer, step
        self.size, self.n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
        self._batches: list[Rollout] = []
        self._num_with_signal = 0
        self._rewards: list[float] = []
        """Of all responses, also of those that are left out."""
        self._prompts: list[Prompt] = []
        self._sequences: list[Sequence] = []
        self._greedy: list[Sequence] = []

    @property
    def is_full(self) -> bool:
        return len(self._prompts) == self.size

    def add(self, batch: Rollout) -> list[Sequence]:
        """Take a generation batch; the sequences of it that are kept, with their index in the rollout.

        Raises TrainingError: the batch was the last one allowed, and there are too few groups; and as `Scorer.scores`.
        """
        pairs, count = answers_to_score(batch), len(batch.sequences)
        self._rewards += self.scorer.rewards(pairs)[:count]
        values = GROUP_METRICS[self.section.metric](self.scorer, pairs)[:count]
        self._batches.append(batch)
        found = groups_with_signal(values, self.n)
        self._num_with_signal += len(found)
        first = len(self._sequences)
        for group in found[: self.size - len(self._prompts)]:
            self._prompts.append(batch.prompts[group])
            self._greedy += batch.greedy[group : group + 1]
            self._sequences += batch.sequences[group * self.n : (group + 1) * self.n]
        self._sequences = [dataclasses.replace(each, index=index) for index, each in enumerate(self._sequences)]
        if not self.is_full:
            self._check_bound()
        return self._sequences[first:]

    def rollout(self) -> Rollout:
        """Of a full batch."""
        generated = len(self._rewards) // self.n
        metrics = {
            "training/num_gen_batches": float(len(self._batches)),
            "training/groups_with_signal": self._num_with_signal / generated,
            "reward/all_groups": float(np.mean(self._rewards)),
        }
        places = enumerate(self._greedy, len(self._sequences))
        greedy = tuple(dataclasses.replace(each, index=index) for index, each in places)
        return dataclasses.replace(
            self._batches[0], prompts=tuple(self._prompts), sequences=tuple(self._sequences), greedy=greedy,
            extra_batches=self._batches[-1].extra_batches, metrics=metrics,
        )

    def _check_bound(self) -> None:
        """Say that a further generation batch is needed. Raises TrainingError if there may be none."""
        done, limit, generated = len(self._batches), self.section.max_num_gen_batches, len(self._rewards) // self.n
        found = (
            f"{self._num_with_signal} of {generated} groups have responses that differ in {self.section.metric} "
            f"(algorithm.filter_groups.metric) after {done} of at most {limit} generation batches; a batch takes "
            f"{self.size}"
        )
        if done < limit:
            logger.info("step %d: %s", self.step, found)
            return
        raise TrainingError(
            f"step {self.step}: {found} (algorithm.filter_groups.max_num_gen_batches={limit}). The mean reward is "
            f"{np.mean(self._rewards):.3g}: prompts may be too hard or too easy. More groups have a signal with other "
            "prompts, more responses to each (actor_rollout_ref.rollout.n) or a higher temperature; a larger "
            "max_num_gen_batches tries longer, and algorithm.filter_groups.enable=false trains on all groups"
        )

"""Cut samples into the mini-batches and micro-batches of the workers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hybrid_gkd.config import ActorConfig, Config, CriticConfig, prompts_per_update
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.types import MiniBatch, Plan, Sample, TokenMean
from hybrid_gkd.workers.aggregation import with_loss_weights

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup


class Batches:
    """Cuts samples into batches for one model, by its section of the configuration."""

    def __init__(self, config: Config, section: ActorConfig | CriticConfig, group: WorkerGroup):
        self.config, self.section, self.group = config, section, group
        self.size = prompts_per_update(config.data.train_batch_size, section)
        """Tasks per mini-batch."""
        limit = section.ppo_max_token_len_per_gpu if section.use_dynamic_bsz else section.ppo_micro_batch_size_per_gpu
        self.capacity = group.size * (limit or 1)
        """Capacity of one micro-batch on each worker together, in the unit of `measure`."""

    def measure(self, sample: Sample) -> int:
        """Return the size of a sample in a micro-batch: its tokens, or 1."""
        return sample.num_tokens if self.section.use_dynamic_bsz else 1

    def count_full(self, samples: list[Sample]) -> int:
        """Return how many of the first samples fill micro-batches on each worker; if there are too few, one on each."""
        sizes = list(itertools.accumulate(map(self.measure, samples)))
        each = max(1, sizes[-1] // self.capacity)
        count = max(1, sum(size <= each * self.capacity for size in sizes))
        while count > 1 and len(self.plan(samples[:count])[0]) > each:  # sequences cannot be split to fit exactly
            count -= 1
        return count

    def mini_batches(self, samples: list[Sample]) -> list[list[Sample]]:
        """Cut one pass over the samples of a rollout into mini-batches, with the factors of `loss_agg_mode`."""
        tasks = [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.id.group)]
        parts = [tasks[start : start + self.size] for start in range(0, len(tasks), self.size)]
        mini_batches = [list(itertools.chain.from_iterable(part)) for part in parts]
        return [with_loss_weights(self.config, each, self.section.loss_agg_mode) for each in mini_batches]

    def epochs(self, samples: list[Sample]) -> list[list[MiniBatch]]:
        """Return for each worker its parts of the mini-batches of `ppo_epochs` passes."""
        return self.shares(self.mini_batches(samples) * (self.section.ppo_epochs or 1))

    def shares(self, mini_batches: list[list[Sample]]) -> list[list[MiniBatch]]:
        """Return for each worker its part of each mini-batch."""
        return [list(shares) for shares in zip(*map(self.parts, mini_batches), strict=True)]

    def parts(self, samples: list[Sample], num_tokens: int | None = None) -> list[MiniBatch]:
        """Return each worker's part of a mini-batch, or of a piece of one that has `num_tokens` trained tokens."""
        num_tokens = num_tokens or sum(sample.num_trained for sample in samples)
        return [MiniBatch(micro_batches=share, num_tokens=num_tokens) for share in self.plan(samples)]

    def plan(self, samples: list[Sample]) -> Plan:
        """Cut samples into micro-batches, the same number for each worker."""
        section = self.section
        plan = plan_micro_batches(
            [sample.num_tokens for sample in samples],
            self.group.size,
            section.ppo_max_token_len_per_gpu if section.use_dynamic_bsz else None,
            None if section.use_dynamic_bsz else section.ppo_micro_batch_size_per_gpu,
            self.config.trainer.balance_batch,
            attention_cost=self.group.attention_cost,
        )
        return [tuple(tuple(samples[i] for i in micro_batch) for micro_batch in share) for share in plan]


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Return the metrics of several optimizer steps together: the last of learning rates, the mean of others.

    The mean is weighted by tokens for a TokenMean, else over the steps that have the metric. With several steps, the
    divergences before the first and the last update are added.
    """
    found: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            found.setdefault(name, []).append(value)
    ends = {}
    if len(divergences := found.get("actor/kl_loss", [])) > 1:
        ends = {"actor/kl_loss/first_update": divergences[0], "actor/kl_loss/last_update": divergences[-1]}
    return ends | {name: each[-1] if name.endswith("/lr") else _mean(each) for name, each in found.items()}


def _mean(values: list[float]) -> float:
    weights = [value.tokens if isinstance(value, TokenMean) else 1.0 for value in values]
    return sum(value * (weight / sum(weights)) for value, weight in zip(values, weights, strict=True))

"""A rollout as the mini-batches and micro-batches of the workers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hybrid_gkd.config import ActorConfig, Config, CriticConfig
from hybrid_gkd.data.packing import plan_micro_batches
from hybrid_gkd.types import MiniBatch, TrainSequence
from hybrid_gkd.workers.aggregation import with_loss_weights

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup

Plan = list[list[tuple[TrainSequence, ...]]]
"""For each worker its micro-batches."""


class Batches:
    """How the sequences of a model are cut, by its section of the configuration."""

    def __init__(self, config: Config, section: ActorConfig | CriticConfig, group: WorkerGroup):
        self.config, self.section, self.group = config, section, group
        prompts = section.ppo_mini_batch_size or config.data.train_batch_size
        self.size = prompts * config.actor_rollout_ref.rollout.n
        """Sequences of a mini-batch."""
        limit = section.ppo_max_token_len_per_gpu if section.use_dynamic_bsz else section.ppo_micro_batch_size_per_gpu
        self.room = group.size * (limit or 1)
        """Of one micro-batch on each worker, in the unit of `measure`."""

    def measure(self, sequence: TrainSequence) -> int:
        """What a sequence takes of a micro-batch: tokens, or one."""
        return sequence.sequence.num_tokens if self.section.use_dynamic_bsz else 1

    def whole(self, sequences: list[TrainSequence]) -> int:
        """How many of the first sequences make full micro-batches on each worker; if there are too few, one on each."""
        sizes = list(itertools.accumulate(map(self.measure, sequences)))
        each = max(1, sizes[-1] // self.room)
        count = max(1, sum(size <= each * self.room for size in sizes))
        while count > 1 and len(self.plan(sequences[:count])[0]) > each:  # they would fit if they could be cut
            count -= 1
        return count

    def epochs(self, sequences: list[TrainSequence], num_tokens: int | None = None) -> list[list[MiniBatch]]:
        """For each worker its shares of the mini-batches of `ppo_epochs` passes.

        `num_tokens`: response tokens of the only mini-batch, where `sequences` is its last part, whose `loss_weights`
        are those of the whole.
        """
        mini_batches = [sequences[start : start + self.size] for start in range(0, len(sequences), self.size)]
        if num_tokens is None:
            mode = self.section.loss_agg_mode
            mini_batches = [with_loss_weights(self.config, mini_batch, mode) for mini_batch in mini_batches]
        shares: list[list[MiniBatch]] = [[] for _ in range(self.group.size)]
        for mini_batch in mini_batches * (self.section.ppo_epochs or 1):
            for share, part in zip(shares, self.parts(mini_batch, num_tokens), strict=True):
                share.append(part)
        return shares

    def parts(self, sequences: list[TrainSequence], num_tokens: int | None = None) -> list[MiniBatch]:
        """For each worker its share of a mini-batch, or of a part of one that has `num_tokens` response tokens."""
        num_tokens = num_tokens or sum(len(item.sequence.response_ids) for item in sequences)
        return [MiniBatch(micro_batches=tuple(share), num_tokens=num_tokens) for share in self.plan(sequences)]

    def plan(self, sequences: list[TrainSequence]) -> Plan:
        """Cut sequences into micro-batches, the same number for each worker."""
        section = self.section
        plan = plan_micro_batches(
            [item.sequence.num_tokens for item in sequences],
            self.group.size,
            section.ppo_max_token_len_per_gpu if section.use_dynamic_bsz else None,
            None if section.use_dynamic_bsz else section.ppo_micro_batch_size_per_gpu,
            self.config.trainer.balance_batch,
            attention_cost=self.group.attention_cost,
        )
        return [[tuple(sequences[i] for i in micro_batch) for micro_batch in share] for share in plan]

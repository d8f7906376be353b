"""The loss of a response token: a distillation term, a policy term, or both.

All are functions of one set of log-probabilities, so that one call of the fused head serves them and their metrics.

Shapes: R response tokens of a micro-batch, r of them in a chunk of the head, K teacher candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.head import LossFunction
from hybrid_gkd.losses.policy import clipped_policy_loss
from hybrid_gkd.losses.table import DIVERGENCES, user_divergence

if TYPE_CHECKING:
    from hybrid_gkd.config import DistillationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Learning signal of the response tokens of a micro-batch; None where the run has no such signal."""

    teacher_logprobs: Tensor | None = None  # [R, K], of the teacher's candidates
    teacher_tail: Tensor | None = None  # [R], log of the teacher's mass outside of them
    teacher_sampled: Tensor | None = None  # [R], the teacher's log-probability of the sampled token
    advantages: Tensor | None = None  # [R], from task rewards
    old_logprobs: Tensor | None = None  # [R], see `TrainSequence`
    importance_weights: Tensor | None = None  # [R], factors of the loss

    def __getitem__(self, rows: slice) -> Targets:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Targets(**{name: None if value is None else value[rows] for name, value in values.items()})


class Objective:
    """The loss of a run: `config` is the checked section `distillation`, `clip_ratio` that of PPO's policy loss."""

    def __init__(self, config: DistillationConfig, *, clip_ratio: float):
        self.config = config
        self.clip_ratio = clip_ratio
        weights = config.mixed_weights if config.loss_mode == "mixed" else {config.loss_mode: 1.0}
        self._terms = [(weight, DIVERGENCES[name]) for name, weight in weights.items()]
        if config.loss_fn is not None:
            self._terms = [(1.0, user_divergence(config.loss_fn))]
        on_rewards = not config.enabled or config.use_task_rewards
        self.uses_sampled = on_rewards or any(row.signal == "sampled" for _, row in self._terms)
        """Whether the last column of the log-probabilities must be the sampled token."""
        none, row = torch.zeros(0), torch.zeros(0, 1)
        teacher = {"teacher_logprobs": row, "teacher_tail": none, "teacher_sampled": none} if config.enabled else {}
        nothing = Targets(**teacher, advantages=none if on_rewards else None)
        self.reported = list(self.loss_fn(nothing)(torch.zeros(0, 3), slice(None))[1])
        """Names of the metrics of `loss_fn`."""

    def loss_fn(self, targets: Targets) -> LossFunction:
        """The loss as the head wants it. Its log-probabilities are those of the teacher's candidates [r, K] and of
        everything else together [r, 1], if there is a teacher (`tail_topk` = K of the head), and then of the sampled
        token [r, 1], if `uses_sampled`."""

        def loss_fn(logprobs: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            chunk, parts = targets[rows], dict[str, Tensor]()
            terms = []
            if chunk.teacher_logprobs is not None:
                terms.append(self._distillation(chunk, logprobs, parts) * self.config.distillation_loss_coef)
            if chunk.advantages is not None:
                policy = self._policy(chunk, chunk.advantages, logprobs[:, -1], parts)
                parts["actor/pg_loss"] = policy
                terms.append(policy)
            loss = torch.stack(terms).sum(0)
            if chunk.importance_weights is not None:
                loss = loss * chunk.importance_weights
            return loss, {name: value.detach() for name, value in parts.items()}

        return loss_fn

    def _distillation(self, chunk: Targets, logprobs: Tensor, parts: dict[str, Tensor]) -> Tensor:
        """The weighted sum of the configured divergences, or its policy gradient, [r]."""
        teacher, teacher_tail, config = chunk.teacher_logprobs, chunk.teacher_tail, self.config
        assert teacher is not None
        assert teacher_tail is not None
        student, tail, sampled = logprobs[:, : teacher.shape[1]], logprobs[:, teacher.shape[1]], logprobs[:, -1]
        # In every mode, so that runs with different losses can be compared.
        forward, reverse = divergence.kl_both_ways(teacher, student, teacher_tail, tail)
        known = {DIVERGENCES["forward_kl"]: forward, DIVERGENCES["reverse_kl"]: reverse}
        terms = []
        for factor, row in self._terms:
            if config.tail == "bucket" and row in known:
                value = known[row]
            elif row.signal == "sampled":
                value = row.function(chunk.teacher_sampled, sampled)
            else:
                options = {name: getattr(config, name) for name in row.options}
                tails = divergence.tails_for(row.function, teacher_tail, tail)
                value = row.function(teacher, student, **tails, **options)
            terms.append(factor * value)
        value = torch.stack(terms).sum(0)
        parts["actor/kl_loss"] = value
        parts |= {"actor/distillation/forward_kl": forward, "actor/distillation/reverse_kl": reverse}
        parts["actor/distillation/student_mass"] = divergence.support_mass(student.detach())
        parts["actor/distillation/teacher_mass"] = -teacher_tail.expm1()  # float16 has rounded the candidates' own
        limit, weight = config.loss_max_clamp, value
        if config.use_policy_gradient:
            assert chunk.teacher_sampled is not None
            weight = divergence.score_weight(config.loss_mode, chunk.teacher_sampled, sampled)
        if limit is not None:
            parts["actor/distillation/clamp_share"] = weight.abs() > limit
            value, weight = value.clamp(-limit, limit), weight.clamp(-limit, limit)
        if config.use_policy_gradient:
            # The added term has no gradient: it makes the loss of the first pass the estimator's mean.
            return self._policy(chunk, -weight, sampled, parts) + (value - weight).detach()
        return value

    def _policy(self, chunk: Targets, advantages: Tensor, sampled: Tensor, parts: dict[str, Tensor]) -> Tensor:
        old = sampled.detach() if chunk.old_logprobs is None else chunk.old_logprobs
        loss, clipped = clipped_policy_loss(sampled, old, advantages, clip_ratio=self.clip_ratio)
        parts["actor/pg_clipfrac"] = clipped | parts.get("actor/pg_clipfrac", clipped)
        parts["actor/ppo_kl"] = old - sampled
        return loss

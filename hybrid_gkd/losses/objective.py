"""The loss of a response token: a distillation term, a policy term, or both.

All terms are functions of one set of log-probabilities, those of the teacher's candidates and of the sampled token,
so that one call of the fused head serves them. Its metrics cost no further pass over the logits.

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
from hybrid_gkd.losses.table import DIVERGENCES, Divergence, user_divergence

if TYPE_CHECKING:
    from hybrid_gkd.config import DistillationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Learning signal of the response tokens of a micro-batch; None where the run has no such signal."""

    teacher_logprobs: Tensor | None = None
    """[R, K], log-probabilities of the teacher's candidates."""
    teacher_sampled: Tensor | None = None
    """[R], the teacher's log-probability of the sampled token."""
    advantages: Tensor | None = None
    """[R], from task rewards."""
    old_logprobs: Tensor | None = None
    """[R], see `TrainSequence`; None: the weights being trained are still those of the rollout's first step."""
    importance_weights: Tensor | None = None
    """[R], factors of the loss."""

    def __getitem__(self, rows: slice) -> Targets:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Targets(**{name: None if value is None else value[rows] for name, value in values.items()})


class Objective:
    """The loss of a run.

    Args:
        config: the section `distillation`, checked.
        clip_ratio: of PPO's policy loss.
    """

    def __init__(self, config: DistillationConfig, *, clip_ratio: float):
        self.config = config
        self.clip_ratio = clip_ratio
        self._terms = self._divergence_terms()
        """Divergences with their weights: one, or those of loss_mode=mixed."""
        on_samples = any(row.signal == "sampled" for _, row in self._terms)
        self.uses_sampled = not config.enabled or config.use_task_rewards or on_samples
        """Whether the last column of the log-probabilities must be the sampled token."""
        self.reported = self._reported()
        """Names of the metrics of `loss_fn`."""

    def loss_fn(self, targets: Targets) -> LossFunction:
        """The loss as the head wants it.

        Its log-probabilities are those of the teacher's candidates [r, K] and of everything else together [r, 1], if
        there is a teacher (`tail_topk` = K of the head), and then of the sampled token [r, 1], if `uses_sampled`.
        """

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

    def _reported(self) -> list[str]:
        none, row = torch.zeros(0), torch.zeros(0, 1)
        teacher = {"teacher_logprobs": row, "teacher_sampled": none} if self.config.enabled else {}
        rewards = {} if self.config.enabled and not self.config.use_task_rewards else {"advantages": none}
        _, parts = self.loss_fn(Targets(**teacher, **rewards))(torch.zeros(0, 3), slice(None))
        return list(parts)

    def _distillation(self, chunk: Targets, logprobs: Tensor, parts: dict[str, Tensor]) -> Tensor:
        teacher = chunk.teacher_logprobs
        assert teacher is not None
        support, tail = logprobs[:, : teacher.shape[1]], logprobs[:, teacher.shape[1]]
        # In every mode, so that runs with different losses can be compared.
        forward, reverse = divergence.kl_both_ways(teacher, support, student_tail=tail)
        known = {DIVERGENCES["forward_kl"]: forward, DIVERGENCES["reverse_kl"]: reverse}
        value = self._divergence(chunk, logprobs, known if self.config.tail == "bucket" else {})
        parts["actor/kl_loss"] = value
        parts |= {"actor/distillation/forward_kl": forward, "actor/distillation/reverse_kl": reverse}
        parts["actor/distillation/student_mass"] = divergence.support_mass(support.detach())
        parts["actor/distillation/teacher_mass"] = divergence.support_mass(teacher.to(support.dtype))
        limit, weight = self.config.loss_max_clamp, value
        if self.config.use_policy_gradient:
            assert chunk.teacher_sampled is not None
            weight = divergence.score_weight(self.config.loss_mode, chunk.teacher_sampled, logprobs[:, -1])
        if limit is not None:
            parts["actor/distillation/clamp_share"] = weight.abs() > limit
            value, weight = value.clamp(-limit, limit), weight.clamp(-limit, limit)
        if self.config.use_policy_gradient:
            # The added term has no gradient: it makes the loss of the first pass the estimator's mean.
            return self._policy(chunk, -weight, logprobs[:, -1], parts) + (value - weight).detach()
        return value

    def _divergence_terms(self) -> list[tuple[float, Divergence]]:
        if self.config.loss_fn is not None:
            return [(1.0, user_divergence(self.config.loss_fn))]
        weights = self.config.mixed_weights if self.config.loss_mode == "mixed" else {self.config.loss_mode: 1.0}
        return [(weight, DIVERGENCES[name]) for name, weight in weights.items()]

    def _divergence(self, chunk: Targets, logprobs: Tensor, known: dict[Divergence, Tensor]) -> Tensor:
        """The weighted sum of the configured divergences, [r]."""
        assert chunk.teacher_logprobs is not None
        num_candidates = chunk.teacher_logprobs.shape[1]
        student, student_tail = logprobs[:, :num_candidates], logprobs[:, num_candidates]
        terms = []
        for weight, row in self._terms:
            if row in known:
                value = known[row]
            elif row.signal == "sampled":
                value = row.function(chunk.teacher_sampled, logprobs[:, -1])
            else:
                options = {name: getattr(self.config, name) for name in row.options}
                value = row.function(chunk.teacher_logprobs, student, student_tail=student_tail, **options)
            terms.append(value if weight == 1 else weight * value)
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    def _policy(self, chunk: Targets, advantages: Tensor, sampled: Tensor, parts: dict[str, Tensor]) -> Tensor:
        old = sampled.detach() if chunk.old_logprobs is None else chunk.old_logprobs
        loss, clipped = clipped_policy_loss(sampled, old, advantages, clip_ratio=self.clip_ratio)
        parts["actor/pg_clipfrac"] = clipped | parts.get("actor/pg_clipfrac", clipped)
        parts["actor/ppo_kl"] = old - sampled
        return loss

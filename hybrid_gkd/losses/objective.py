"""The loss of a response token: a distillation term, a policy term, or both.

All are functions of one set of log-probabilities, so that one call of the fused head serves them and their metrics.

Shapes: R response tokens of a micro-batch, r of them in a chunk of the head, K teacher candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.head import LossFunction
from hybrid_gkd.losses.table import DIVERGENCES, KL_LOSSES, policy_loss, weighted_divergences


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Learning signal of the response tokens of a micro-batch; None where the run has no such signal."""

    teacher_logprobs: Tensor | None = None  # [R, K], of the teacher's candidates
    teacher_tail: Tensor | None = None  # [R], log of the teacher's mass outside of them
    teacher_sampled: Tensor | None = None  # [R], the teacher's log-probability of the sampled token
    teacher_weights: Tensor | None = None  # [R], factors of the distillation term
    advantages: Tensor | None = None  # [R], from rewards
    old_logprobs: Tensor | None = None  # [R], see `TrainSequence`
    ref_logprobs: Tensor | None = None  # [R], of the sampled token under the reference policy
    ref_topk_logprobs: Tensor | None = None  # [R, K], of the reference's candidates, in the teacher's place
    ref_tail: Tensor | None = None  # [R], log of the reference's mass outside of them
    loss_weights: Tensor | None = None  # [R], factors of the loss
    sampled_weights: Tensor | None = None  # [R], further factors of its terms of the sampled token
    sequence: Tensor | None = None  # [R], int64, the number of the token's sequence, ascending from 0
    sequence_log_ratio: Tensor | None = None  # [R], see `Objective.with_sequence_ratios`

    def __getitem__(self, rows: slice) -> Targets:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Targets(**{name: None if value is None else value[rows] for name, value in values.items()})

    def weighted(self, value: Tensor) -> Tensor:
        """A term of the sampled token [R] with its factors."""
        return value if self.sampled_weights is None else value * self.sampled_weights


class Objective:
    """The loss of a run: `config` and `actor` are the checked sections `distillation` and `actor_rollout_ref.actor`."""

    def __init__(self, config: Any, actor: Any):
        self.config = config
        bounds = {f"clip_ratio_{side}": getattr(actor, f"clip_ratio_{side}") for side in ("low", "high")}
        options = {key: actor.clip_ratio if value is None else value for key, value in bounds.items()}
        options["clip_ratio_c"] = math.inf if actor.clip_ratio_c is None else actor.clip_ratio_c
        self._policy_loss = policy_loss(actor.policy_loss.loss_mode)
        self._policy_options = {key: options[key] for key in self._policy_loss.options}
        self._entropy_coeff = actor.entropy_coeff
        self._reference_kl, self._kl_loss_coef = KL_LOSSES[actor.kl_loss_type], actor.kl_loss_coef
        self._terms = weighted_divergences(config.loss_mode, config.mixed_weights, config.loss_fn)
        self._of_sampled = any(row.signal == "sampled" for _, row in self._terms)
        on_rewards = not config.enabled or config.use_task_rewards or config.as_reward
        self.uses_sampled = on_rewards or actor.use_kl_loss or self._of_sampled
        """Whether the last column of the log-probabilities must be the sampled token."""
        none, row = torch.zeros(0), torch.zeros(0, 1)
        teacher = {"teacher_logprobs": row, "teacher_tail": none, "teacher_sampled": none} if config.enabled else {}
        self.of_sequences = self._policy_loss.of_sequences and (on_rewards or config.use_policy_gradient)
        """Whether the loss needs `with_sequence_ratios`, where there are old log-probabilities."""
        reference = {"ref_logprobs": none} if actor.use_kl_loss else {}
        if self._reference_kl.signal == "topk":
            reference |= {"ref_topk_logprobs": row, "ref_tail": none} if reference else {}
        nothing = Targets(**teacher, **reference, advantages=none if on_rewards else None)
        self.reported = list(self.loss_fn(nothing)(torch.zeros(0, 3), slice(None))[1])
        """Names of the metrics of `loss_fn`."""

    def with_sequence_ratios(self, targets: Targets, sampled: Tensor) -> Targets:
        """The same with the mean of log r over each sequence, from the log-probabilities of the sampled tokens [R].

        The head sees a few rows at a time, which need not be a whole sequence.
        """
        assert targets.sequence is not None
        assert targets.old_logprobs is not None
        sums = sampled.new_zeros(2, len(targets.sequence))
        sums[0].index_add_(0, targets.sequence, sampled - targets.old_logprobs)
        sums[1].index_add_(0, targets.sequence, torch.ones_like(sampled))
        return replace(targets, sequence_log_ratio=(sums[0] / sums[1].clamp(min=1))[targets.sequence])

    def entropy_weights(self, targets: Targets, num_rows: int, device: torch.device) -> Tensor | None:
        """What a row's entropy counts in the loss, [R], for the head; None where it does not."""
        if not self._entropy_coeff:
            return None
        weights = targets.loss_weights
        weights = torch.ones(num_rows, device=device) if weights is None else weights
        return -self._entropy_coeff * weights

    def loss_fn(self, targets: Targets) -> LossFunction:
        """The loss as the head wants it. Its log-probabilities are those of the teacher's candidates [r, K] and of
        everything else together [r, 1], if there is a teacher (`tail_topk` = K of the head), and then of the sampled
        token [r, 1], if `uses_sampled`. The reference's candidates take the place of a teacher's."""

        def loss_fn(logprobs: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            chunk, parts = targets[rows], dict[str, Tensor]()
            terms = []
            if chunk.teacher_logprobs is not None:
                value = self._distillation(chunk, logprobs, parts)
                # As a reward it is in the advantages; the divergence is only reported then.
                value = value * (0.0 if self.config.as_reward else self.config.distillation_loss_coef)
                value = chunk.weighted(value) if self._of_sampled else value
                terms.append(value if chunk.teacher_weights is None else value * chunk.teacher_weights)
            if chunk.advantages is not None:
                policy = self._policy(chunk, chunk.advantages, logprobs[:, -1], parts)
                parts["actor/pg_loss"] = policy
                terms.append(chunk.weighted(policy))
            if chunk.ref_logprobs is not None:
                parts["actor/ref_kl"] = kl = self._kl_to_reference(chunk, logprobs)
                kl = chunk.weighted(kl) if self._reference_kl.signal == "sampled" else kl
                terms.append(self._kl_loss_coef * kl)
            loss = torch.stack(terms).sum(0)
            if chunk.loss_weights is not None:
                loss = loss * chunk.loss_weights
            return loss, {name: value.detach() for name, value in parts.items()}

        return loss_fn

    def keep_divergences(self, targets: Targets, found: Tensor) -> LossFunction:
        """A loss of 0 for the head, which writes into `found` [R, 2 + 3 s] of every token: forward and reverse KL, the
        student's log-probabilities of the teacher's first s candidates, and of the s candidates that the student finds
        most likely its log-probabilities and their numbers among the teacher's."""

        def keep(logprobs: Tensor, rows: slice) -> tuple[Tensor, dict[str, Tensor]]:
            chunk = targets[rows]
            assert chunk.teacher_logprobs is not None
            assert chunk.teacher_tail is not None
            student, tail = logprobs[:, : chunk.teacher_logprobs.shape[1]], logprobs[:, chunk.teacher_logprobs.shape[1]]
            both = divergence.kl_both_ways(chunk.teacher_logprobs, student, chunk.teacher_tail, tail)
            shown = (found.shape[1] - 2) // 3
            best, columns = student.topk(shown, dim=1)
            found[rows] = torch.cat([torch.stack(both, 1), student[:, :shown], best, columns], 1).to(found.dtype)
            return logprobs.new_zeros(len(logprobs)), {}

        return keep

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
        limit, weight = None if config.as_reward else config.loss_max_clamp, value
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

    def _kl_to_reference(self, chunk: Targets, logprobs: Tensor) -> Tensor:
        """Of the sampled token as `kl_loss_type` says, or on the reference's candidates and the rest, [r]."""
        if chunk.ref_topk_logprobs is None:
            return self._reference_kl.function(chunk.ref_logprobs, logprobs[:, -1])
        k = chunk.ref_topk_logprobs.shape[1]
        tails = {"teacher_tail": chunk.ref_tail, "student_tail": logprobs[:, k]}
        return self._reference_kl.function(chunk.ref_topk_logprobs, logprobs[:, :k], tail="bucket", **tails)

    def _policy(self, chunk: Targets, advantages: Tensor, sampled: Tensor, parts: dict[str, Tensor]) -> Tensor:
        old = sampled.detach() if chunk.old_logprobs is None else chunk.old_logprobs
        options: dict[str, Any] = dict(self._policy_options)
        if self._policy_loss.of_sequences:
            ratios = chunk.sequence_log_ratio
            options["sequence_log_ratio"] = torch.zeros_like(old) if ratios is None else ratios
        loss, clipped = self._policy_loss.function(sampled, old, advantages, **options)
        parts["actor/pg_clipfrac"] = clipped | parts.get("actor/pg_clipfrac", clipped)
        parts["actor/ppo_kl"] = old - sampled
        return loss

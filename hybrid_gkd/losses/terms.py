"""The terms of an actor's loss: each a function of the student's log-probabilities and of one signal.

A term covers the samples that have its signal. Its function also gets the other rows of a micro-batch, with neutral
values; its results for them are ignored.

Shapes: R trained tokens of a micro-batch, r of them in a chunk of the head, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid_gkd.losses import divergence
from hybrid_gkd.losses.head_torch import MASKED_LOGIT
from hybrid_gkd.losses.table import DIVERGENCES, Divergence, PolicyLoss
from hybrid_gkd.types import QUARTERS

Signals = Mapping[str, Tensor]
"""Tensors of the trained tokens of a micro-batch or chunk, by the names of SIGNALS in hybrid_gkd/types.py: [r]; for
candidates <name>.logprobs [r, K], <name>.tail_logprobs [r], <name>.sampled_logprobs [r] and, for events, <name>.groups
[r, K]. Signals that no sample has are missing; has.<name>, bool [r], marks the rows that have it, if not all do.
sequence_log_ratio: see `Objective`; quarter: the quarter of its completion that a token is in, 0 to 3; sampled_ids: the
student's sampled tokens, -1 in given completions."""
Metrics = dict[str, Tensor]
"""Metrics [r] by name."""


class Student(NamedTuple):
    """The student's log-probabilities at the tokens of a chunk."""

    sampled: Tensor
    """[r], of the sampled tokens; meaningless unless a term needs them."""
    candidates: Tensor
    """[r, K], of the candidates of the term's signal; K = 0 without candidates."""
    tail: Tensor | None
    """[r], the log of the mass outside of the candidates; None without candidates."""


def by_event(student: Student, groups: Tensor) -> Student:
    """Return the log-probabilities of events: the sums of the tokens with the same number in `groups` [r, K], in the
    column of that number; other columns are -inf. Tokens with the number -1 belong to the tail."""
    assert student.tail is not None
    rows, columns = groups.shape
    places = torch.where(groups < 0, columns, groups)
    found = student.candidates.new_full((rows, columns + 1), -math.inf)
    peaks = found.scatter_reduce(1, places, student.candidates.detach(), "amax")
    sums = torch.zeros_like(found).scatter_add(1, places, (student.candidates - peaks.gather(1, places)).exp())
    sums = torch.where(sums > 0, sums.clamp(min=1).log() + peaks.clamp(min=MASKED_LOGIT), -math.inf)
    return student._replace(candidates=sums[:, :columns], tail=torch.logaddexp(student.tail, sums[:, columns]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of the loss."""

    name: str
    """Name in TERMS of table.py, with distillation.ensemble=sum followed by / and the name of its teacher;
    weights/<name> are its weights unless it applies to all samples."""
    signal: str
    """Signal that a sample must have; <signal>_weights, without the name of a teacher, are further factors."""
    function: Callable[[Signals, Student], tuple[Tensor, Metrics]]
    """A chunk's signals and the student -> the value [r], with gradient, and metrics."""
    of_sampled: bool
    """Whether it depends on the sampled token; `sampled_weights` are then factors."""
    of_candidates: bool = False
    """Whether its signal has candidates."""
    samples_tail: bool = False
    """Whether it needs `sampled_ids`."""
    coefficient: float = 1.0


Policy = Callable[[Signals, Tensor, Tensor], tuple[Tensor, Metrics]]
"""A chunk's signals, advantages [r], the student's log-probabilities of the sampled tokens [r] -> see `Term`."""


def policy_loss(row: PolicyLoss, options: Mapping[str, float]) -> Policy:
    """Return a policy loss with its options; without old log-probabilities the ratio is 1."""

    def function(chunk: Signals, advantages: Tensor, sampled: Tensor) -> tuple[Tensor, Metrics]:
        old, of_sequences = old_logprobs(chunk, sampled), dict[str, Any]()
        if row.of_sequences:
            ratios = chunk.get("sequence_log_ratio")
            of_sequences["sequence_log_ratio"] = torch.zeros_like(old) if ratios is None else ratios
        loss, clipped = row.function(sampled, old, advantages, **options, **of_sequences)
        return loss, {"actor/pg_clipfrac": clipped, "actor/ppo_kl": old - sampled}

    return function


def old_logprobs(signals: Signals, sampled: Tensor) -> Tensor:
    """Return log-probabilities [r] under the weights before the rollout's first mini-batch, or else `sampled`."""
    if "old_logprobs" not in signals:
        return sampled.detach()
    old, known = signals["old_logprobs"], signals.get("has.old_logprobs")
    return old if known is None else torch.where(known, old, sampled.detach())


def sft() -> Term:
    """Return the cross-entropy of given completions: -log q of each trained token, times the signal's factor."""

    def function(chunk: Signals, student: Student) -> tuple[Tensor, Metrics]:
        return -student.sampled * chunk["sft"], {"actor/sft_loss": -student.sampled}

    return Term(name="sft", signal="sft", function=function, of_sampled=True)


def policy(loss: Policy) -> Term:
    """Return the term of a policy loss on advantages."""

    def function(chunk: Signals, student: Student) -> tuple[Tensor, Metrics]:
        value, metrics = loss(chunk, chunk["advantages"], student.sampled)
        return value, metrics | {"actor/pg_loss": value}

    return Term(name="policy", signal="advantages", function=function, of_sampled=True)


def reference(kl: Divergence, coefficient: float) -> Term:
    """Return the KL from the student to the reference policy, of the sampled token or on the reference's candidates."""

    def of_sampled(chunk: Signals, student: Student) -> tuple[Tensor, Metrics]:
        value = kl.function(chunk["reference"], student.sampled)
        return value, {"actor/ref_kl": value}

    def of_candidates(chunk: Signals, student: Student) -> tuple[Tensor, Metrics]:
        tails = {"teacher_tail": chunk["reference_topk.tail_logprobs"], "student_tail": student.tail}
        value = kl.function(chunk["reference_topk.logprobs"], student.candidates, tail="bucket", **tails)
        return value, {"actor/ref_kl": value}

    sampled = kl.signal == "sampled"
    return Term(
        name="reference", signal="reference" if sampled else "reference_topk", of_sampled=sampled,
        function=of_sampled if sampled else of_candidates, of_candidates=not sampled, coefficient=coefficient,
    )


def compared(found: divergence.Comparison, quarter: Tensor | None) -> Metrics:
    """Return the metrics of a comparison of teacher and student; `quarter` [r]: see `Signals`."""
    metrics = {
        "actor/distillation/forward_kl": found.forward_kl,
        "actor/distillation/reverse_kl": found.reverse_kl,
        "actor/distillation/teacher_entropy": found.teacher_entropy,
        "actor/distillation/entropy_gap": found.student_entropy - found.teacher_entropy,
    }
    if quarter is not None:
        for number in range(QUARTERS):
            of_quarter = torch.where(quarter == number, found.forward_kl, 0.0)
            metrics[f"actor/distillation/forward_kl/q{number + 1}"] = of_quarter
    return metrics


def weighted_sum(
    divergences: Sequence[tuple[float, Divergence]], found: divergence.Comparison, chunk: Signals, signal: str,
    student: Student, *, tail: str, beta: float,
) -> Tensor:
    """Return the weighted sum of divergences to the teacher whose signal has this name, [r].

    `found`: their comparison with the bucket; `tail`, `beta`: keys of the section `distillation`.
    """
    teacher, teacher_tail = chunk[f"{signal}.logprobs"], chunk[f"{signal}.tail_logprobs"]
    forward = found.forward_kl
    if tail == "sampled":
        assert student.tail is not None
        ids, tokens = chunk[f"{signal}.ids"], chunk["sampled_ids"]
        outside = (tokens >= 0) & (ids != tokens[:, None]).all(1)
        both = chunk[f"{signal}.sampled_logprobs"], student.sampled
        forward, tail = forward + divergence.within_tail(*both, teacher_tail, student.tail, outside), "bucket"
    settings = {"tail": tail, "beta": beta}
    known = {DIVERGENCES["forward_kl"]: forward, DIVERGENCES["reverse_kl"]: found.reverse_kl}
    values = []
    for factor, row in divergences:
        if tail == "bucket" and row in known:
            value = known[row]
        elif row.signal == "sampled":
            value = row.function(chunk[f"{signal}.sampled_logprobs"], student.sampled)
        else:
            options = {name: settings[name] for name in row.options}
            tails = divergence.tails_for(row.function, teacher_tail, student.tail)
            both = divergence.finite(teacher), divergence.finite(student.candidates)
            value = row.function(*both, **tails, **options)
        values.append(factor * value)
    return torch.stack(values).sum(0)


def distillation(
    divergences: Sequence[tuple[float, Divergence]], *, tail: str, beta: float, coefficient: float,
    limit: float | None = None, estimator: str = "", policy: Policy | None = None, teacher: str = "",
) -> Term:
    """Return the weighted sum of divergences to the teacher, for each token clamped to -limit and limit.

    With `policy` it is the policy gradient of the `estimator` k1, k2 or k3, and `limit` applies to the advantage. With
    several teachers, each has a term with its name, `teacher`, and its own metrics of divergences.
    """
    suffix = f"/{teacher}" if teacher else ""
    signal = f"teacher{suffix}"

    def function(chunk: Signals, student: Student) -> tuple[Tensor, Metrics]:
        target, teacher_tail = chunk[f"{signal}.logprobs"], chunk[f"{signal}.tail_logprobs"]
        if f"{signal}.groups" in chunk:
            student, given = by_event(student, chunk[f"{signal}.groups"]), chunk[f"{signal}.sampled_logprobs"]
            given = torch.where(given.isnan(), student.sampled.detach(), given)
            chunk = {**chunk, f"{signal}.sampled_logprobs": given}
        # With every loss, so that runs with different losses can be compared.
        found = divergence.compare(target, student.candidates, teacher_tail, student.tail)
        value = weighted_sum(divergences, found, chunk, signal, student, tail=tail, beta=beta)
        metrics = {
            "actor/kl_loss": value,
            "actor/distillation/student_mass": divergence.support_mass(student.candidates.detach()),
            "actor/distillation/teacher_mass": -teacher_tail.expm1(),  # exact, unlike the sum of float16 candidates
        } | compared(found, chunk.get("quarter"))
        if suffix:
            own = {"kl_loss": value, "forward_kl": found.forward_kl, "reverse_kl": found.reverse_kl}
            metrics |= {f"actor/distillation{suffix}/{name}": part for name, part in own.items()}
        weight = value
        if policy is not None:
            weight = divergence.score_weight(estimator, chunk[f"{signal}.sampled_logprobs"], student.sampled)
        if limit is not None:
            metrics["actor/distillation/clamp_share"] = weight.abs() > limit
            value, weight = value.clamp(-limit, limit), weight.clamp(-limit, limit)
        if policy is None:
            return value, metrics
        loss, reported = policy(chunk, -weight, student.sampled)
        # The added constant makes the value of the loss in the first pass the mean of the estimator.
        return loss + (value - weight).detach(), metrics | reported

    return Term(
        name=f"distillation{suffix}", signal=signal, function=function, coefficient=coefficient, of_candidates=True,
        of_sampled=any(row.signal == "sampled" for _, row in divergences), samples_tail=tail == "sampled",
    )

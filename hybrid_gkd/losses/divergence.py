"""Divergences between teacher and student as plain functions of [T, K] log-probabilities.

S is the teacher's top-k set of a row, p the teacher, q the student, P and Q their masses on S; both
come normalised over the whole vocabulary V. `tail` decides about the rest of the vocabulary:

    bucket       it is one more outcome, of mass 1 - P and 1 - Q: a divergence of K + 1 outcomes, a lower
                 bound of the full one (data-processing inequality)
    none         it is left out: a plain sum over S; can be negative. The forward divergence is least at q = p / P and
                 pushes all of the student's mass into S, the reverse one is least at q = p / e: out of S
    renormalise  p / P against q / Q: compares the shapes within S and leaves Q alone

With K = V the three agree. The functions return one value per row; the caller divides their sum over
valid response tokens by the number of those tokens in the global batch.

The logs of the tails, log(1 - P) and log(1 - Q), are summed outside of S by the scoring engine and by the head: no
difference of near numbers, so "bucket" is as exact as their float32 and the float16 of the candidates. A log tail
counts as -TAIL_LIMIT at least, a mass of 2e-35: below it, also with K = V, both sides are equal, and reverse_kl stays
finite where the teacher has nothing outside of S, and the student has.

A caller without a tail (None) gets 1 - P or 1 - Q of the log-probabilities, at least TAIL_FLOOR. forward_kl is then off
by at most about TAIL_FLOOR log(1 / TAIL_FLOOR) for the teacher's, reverse_kl by (1 - Q) log(TAIL_FLOOR / (1 - P)). A
student's tail that is 1 - Q of a float32 head is noisy: the pull on it is off by about TAIL_FLOOR / (1 - Q) of its
size, and below TAIL_FLOOR it keeps its direction but only (1 - Q) / TAIL_FLOOR of its size, so that forward_kl's logit
gradient is off by up to about 3 (1 - P) in L1 norm.

Shapes: T rows (packed response tokens), K teacher candidates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.losses.head_torch import MASKED_LOGIT, TAIL_LIMIT

LOG_RATIO_LIMIT = 20.0
"""Bound of the log-ratio in k3, in both directions: exp(89) is inf in float32."""
TAIL_FLOOR = 1e-6
"""Smallest mass of a tail that is 1 - P or 1 - Q; about the noise of 1 - Q from a float32 head."""


def forward_kl(
    teacher_logprobs: Tensor, student_logprobs: Tensor, *, tail: str, teacher_tail: Tensor | None = None,
    student_tail: Tensor | None = None,
) -> Tensor:
    """KL(teacher || student) per row, [T], in nats: sum p log(p / q) over the outcomes that `tail` names.

    Args:
        teacher_logprobs: [T, K], without gradient. They arrive in float16, so P may come out slightly
            wrong: with "bucket", P and the tail are scaled to 1 together. -inf, of either side, counts as -TAIL_LIMIT.
        student_logprobs: [T, K] of the same ids; they receive the gradient.
        tail: "bucket" (at least 0 up to rounding), "none" (any sign) or "renormalise", see above.
        teacher_tail: [T], log(1 - P) as the teacher sends it, -inf where it has nothing outside of S.
        student_tail: [T], log(1 - Q) as `head_loss` gives it, which receives a gradient as well. Only "bucket" uses the
            two; None takes a tail from the log-probabilities, see above.

    Raises:
        ValueError: the shapes differ, or an unknown `tail`.

    Source: Hinton et al., arXiv 1503.02531, for the full-vocabulary loss that K = V gives.
    """
    return _kl(*_outcomes(teacher_logprobs, student_logprobs, tail, teacher_tail, student_tail))


def reverse_kl(
    teacher_logprobs: Tensor, student_logprobs: Tensor, *, tail: str, teacher_tail: Tensor | None = None,
    student_tail: Tensor | None = None,
) -> Tensor:
    """KL(student || teacher) per row, in nats: sum q log(q / p). Arguments, result, errors: as `forward_kl`.

    Source: Gu et al., MiniLLM, arXiv 2306.08543, for the full vocabulary.
    """
    teacher, student = _outcomes(teacher_logprobs, student_logprobs, tail, teacher_tail, student_tail)
    return _kl(student, teacher)


def jsd(
    teacher_logprobs: Tensor, student_logprobs: Tensor, *, beta: float, tail: str, teacher_tail: Tensor | None = None,
    student_tail: Tensor | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence per row, in nats. Other arguments, result, errors: as `forward_kl`.

        beta KL(p || m) + (1 - beta) KL(q || m),   m = beta p + (1 - beta) q,   beta from 0 to 1

    Divided by beta it tends to KL(p || q) as beta -> 0, divided by 1 - beta to KL(q || p) as beta -> 1. The values
    at 0 and 1 are those limits, so the scale jumps there: a learning rate found at beta = 0.5 is not one for beta = 0.

    Source: Agarwal et al., GKD, arXiv 2306.13649, section 3.1.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be between 0 and 1; got {beta}")
    teacher, student = _outcomes(teacher_logprobs, student_logprobs, tail, teacher_tail, student_tail)
    if beta in (0, 1):
        return _kl(teacher, student) if beta == 0 else _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


class Comparison(NamedTuple):
    """Teacher and student on the teacher's candidates and the bucket, [T] each, nats."""

    forward_kl: Tensor
    reverse_kl: Tensor
    teacher_entropy: Tensor
    student_entropy: Tensor


def compare(
    teacher_logprobs: Tensor, student_logprobs: Tensor, teacher_tail: Tensor, student_tail: Tensor | None
) -> Comparison:
    """`forward_kl` and `reverse_kl` with the bucket, and both entropies without gradient, on the same outcomes."""
    teacher, student = _outcomes(teacher_logprobs, student_logprobs, "bucket", teacher_tail, student_tail)
    log_ratio, p, q = teacher - student, teacher.exp(), student.exp()
    entropies = torch.special.entr(p.detach()).sum(-1), torch.special.entr(q.detach()).sum(-1)
    return Comparison((p * log_ratio).sum(-1), -(q * log_ratio).sum(-1), *entropies)


def k1(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """log q - log p of the sampled tokens, [T] and [T] -> [T]: unbiased for KL(q || p) if they are drawn from q.

    As a loss it teaches nothing (its expected gradient is 0); for its policy gradient see `score_weight`.

    Source of k1, k2 and k3: Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    teacher, student = _aligned(teacher_logprobs, student_logprobs)
    return student - teacher


def k2(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """(log q - log p)^2 / 2, [T] and [T] -> [T]. As a loss it has the gradient of KL(q || p) in expectation over q."""
    return k1(teacher_logprobs, student_logprobs).square() / 2


def k3(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """p / q - 1 - log(p / q), [T] and [T] -> [T]: unbiased for KL(q || p), never negative.

    As a loss it has the gradient of the other one, KL(p || q), in expectation over q. A log-ratio beyond
    +-LOG_RATIO_LIMIT counts as that, without gradient.
    """
    log_ratio = -k1(teacher_logprobs, student_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio


def absolute(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """|log q - log p|, [T] and [T] -> [T]. As a loss it has the gradient of sum |q - p|, twice the total variation
    distance, in expectation over q: no token pulls more than any other."""
    return k1(teacher_logprobs, student_logprobs).abs()


def k1_plus(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """The value of k1, unbiased for KL(q || p), with the gradient of k2, which is that of KL(q || p) in expectation."""
    return _straight_through(k1(teacher_logprobs, student_logprobs))


def k3_plus(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """The value of k3, unbiased and never negative, with the gradient of k2; see `k1_plus`."""
    return _straight_through(k1(teacher_logprobs, student_logprobs), k3(teacher_logprobs, student_logprobs))


def score_weight(estimator: str, teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """The w of grad E_q[v] = E_q[w grad log q], where v is "k1", "k2" or "k3"; [T] and [T] -> [T], without gradient.

    w is the value v, as the samples are drawn from q, plus the slope dv / dlog q, as v depends on q itself. With
    l = log q - log p, w = l for k3, which therefore minimises KL(q || p), and w = l^2 / 2 + l for k2, which minimises
    E_q[l^2 / 2]. The slope of k1 is 1 and left out, as E_q[grad log q] = 0.
    """
    log_ratio = k1(teacher_logprobs, student_logprobs).detach()
    return log_ratio.square() / 2 + log_ratio if estimator == "k2" else log_ratio


def tails_for(
    function: Callable[..., Tensor], teacher_tail: Tensor, student_tail: Tensor | None
) -> dict[str, Tensor | None]:
    """Both tails as keyword arguments of a divergence; one's own need not take `teacher_tail`."""
    parameters = inspect.signature(function).parameters.values()
    takes_it = any(each.name == "teacher_tail" or each.kind is each.VAR_KEYWORD for each in parameters)
    return {"student_tail": student_tail} | ({"teacher_tail": teacher_tail} if takes_it else {})


def check_loss_fn(function: Callable[..., Tensor], *, tail: str) -> None:
    """Try out `distillation.loss_fn`, a function like `forward_kl`, on random rows before anything starts.

    The head computes chunk by chunk, so row i of the result may depend on row i of the inputs alone: all rows together
    must give the values and gradients of each row by itself.

    Raises:
        ConfigError: it raises, or the result is not one finite value per row, has no gradient, or mixes rows.
    """
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(2, 5, 9, generator=generator, dtype=torch.float64).log_softmax(-1)[..., :4]

    def refusal(rule: str) -> ConfigError:
        return ConfigError("distillation.loss_fn", rule, show_value=False)

    def evaluate(rows: slice) -> tuple[Tensor, Tensor]:
        teacher, student = together[0, rows], together[1, rows].clone().requires_grad_()
        tails = [(1 - support_mass(logprobs)).log() for logprobs in (teacher, student)]
        try:
            values = function(teacher, student, tail=tail, **tails_for(function, *tails))
        except Exception as error:  # whatever the user's code raises
            raise refusal(f"raised {type(error).__name__} when it was tried: {error}") from error
        if not isinstance(values, Tensor) or values.shape != student.shape[:1]:
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            rule = f"must return one value per row, [T] for log-probabilities [T, K]; of [{len(student)}, 4] it made"
            raise refusal(f"{rule} {found}")
        if not values.requires_grad:
            raise refusal("its result has no gradient for the student's log-probabilities")
        (gradient,) = torch.autograd.grad(values.sum(), student)
        if not (values.isfinite().all() and gradient.isfinite().all()):
            raise refusal("gave values or gradients that are not finite")
        return values.detach(), gradient

    whole = evaluate(slice(None))
    alone = [torch.cat(parts) for parts in zip(*(evaluate(slice(i, i + 1)) for i in range(5)), strict=True)]
    for what, found, expected in zip(("value", "gradient"), whole, alone, strict=True):
        if not torch.allclose(found, expected):
            rule = f"the {what} of a row must depend on that row alone; in a batch with others it changes by"
            raise refusal(f"{rule} {(found - expected).abs().max():.3g}")


def support_mass(logprobs: Tensor) -> Tensor:
    """The probability mass on the given ids, [T, K] -> [T]: P of a teacher, Q of a student."""
    return logprobs.exp().sum(-1)


def _straight_through(log_ratio: Tensor, value: Tensor | None = None) -> Tensor:
    """`value`, or the log-ratio itself, with the gradient of log_ratio^2 / 2."""
    gradient = log_ratio.square() / 2
    return (log_ratio if value is None else value).detach() + (gradient - gradient.detach())


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum p (log p - log q) of log-probabilities, [T, N] and [T, N] -> [T]."""
    return (p.exp() * (p - q)).sum(-1)


def _outcomes(
    teacher: Tensor, student: Tensor, tail: str, teacher_tail: Tensor | None, student_tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the compared outcomes: K tokens, and with "bucket" the rest; two [T, K or K + 1]."""
    if teacher.ndim != 2:
        raise ValueError(f"log-probabilities must both be [T, K]; got {tuple(teacher.shape)} (teacher)")
    teacher, student = _aligned(teacher, student)
    if tail == "none":
        return teacher, student
    if tail == "renormalise":
        return teacher.log_softmax(-1), student.log_softmax(-1)
    if tail != "bucket":
        raise ValueError(f"tail must be 'bucket', 'none' or 'renormalise'; got {tail!r}")
    teacher = torch.cat([teacher, log_tail(teacher, teacher_tail)], -1)
    if teacher_tail is not None:  # float16 has moved P by up to entropy / 2048, and 0 is to be the least divergence
        teacher = teacher.log_softmax(-1)
    return teacher, torch.cat([student, log_tail(student, student_tail)], -1)


def _aligned(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the student's type, -TAIL_LIMIT in the place of -inf. Raises ValueError: broadcasting would be silent."""
    if teacher.shape != student.shape:
        shapes = f"{tuple(teacher.shape)} (teacher) and {tuple(student.shape)} (student)"
        raise ValueError(f"log-probabilities must have one shape; got {shapes}")
    teacher = teacher.to(student.dtype)
    return teacher.masked_fill(teacher.isneginf(), -TAIL_LIMIT), student.masked_fill(student.isneginf(), -TAIL_LIMIT)


def log_tail(logprobs: Tensor, tail: Tensor | None = None) -> Tensor:
    """The log of the mass outside of S, [T, 1], bounded from below; `tail` [T] if it is known by itself."""
    # A plain clamp would also cut the gradient, just where the student must learn that mass outside of S exists.
    if tail is not None:
        tail = tail[:, None].to(logprobs.dtype).clamp(min=MASKED_LOGIT)  # -inf minus itself would be NaN
        return tail.detach().clamp(min=-TAIL_LIMIT) + (tail - tail.detach())
    # Near 0, 1 - Q of a float32 head is noise of either sign, which log and 1/x would turn into the loss: the floor
    # bounds both. With the detached shortfall added, value and slope are those of max(mass, floor) and still reach Q.
    mass = 1 - support_mass(logprobs)[:, None]
    return (mass + (TAIL_FLOOR - mass).clamp(min=0).detach()).log()

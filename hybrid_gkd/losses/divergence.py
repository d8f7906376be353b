"""Divergences between teacher and student as plain functions of [T, K] log-probabilities.

S is the teacher's top-k set of a row, p the teacher, q the student, P and Q their masses on S. Both are normalised over
the whole vocabulary V. `tail` is the treatment of the mass outside of S:

    bucket       one more outcome, of mass 1 - P and 1 - Q. The divergence of the K + 1 outcomes is a lower bound of the
                 full one (data-processing inequality)
    none         left out: a plain sum over S, which can be negative. The forward divergence is minimal at q = p / P,
                 with all of the student's mass in S, the reverse one at q = p / e, with mass outside of S
    renormalise  p / P against q / Q: compares the shapes within S and ignores Q

With K = V the three agree. `distillation.tail=sampled` is "bucket" with the gradient of `within_tail` added. The
functions return one value per row; the caller divides their sum over the trained tokens by the number of those tokens
in the mini-batch.

The log tails log(1 - P) and log(1 - Q) are sums over the ids outside of S, computed by the scoring engine and the head.
No near numbers are subtracted, so "bucket" is as exact as these float32 sums and the float16 candidates. Log tails are
clamped to at least -TAIL_LIMIT, a mass of 2e-35. Without a tail, as with K = V, both sides are then equal, and
reverse_kl is finite where the teacher has no mass outside of S and the student has.

Without a given tail (None) it is 1 - P or 1 - Q of the log-probabilities, at least TAIL_FLOOR. The error of forward_kl
is then at most about TAIL_FLOOR log(1 / TAIL_FLOOR) for the teacher's tail, that of reverse_kl (1 - Q) log(TAIL_FLOOR /
(1 - P)). The student's tail 1 - Q of a float32 head is noisy: the relative error of its gradient is about TAIL_FLOOR /
(1 - Q). Below TAIL_FLOOR the gradient keeps its direction and is scaled by (1 - Q) / TAIL_FLOOR, so that the error of
forward_kl's logit gradient is up to about 3 (1 - P) in L1 norm.

Shapes: T rows (packed trained tokens), K teacher candidates.
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

TAIL_RATIO_LIMIT = 10.0
"""Limit of the ratios in `within_tail`: a rare token could outweigh a mini-batch."""
LOG_RATIO_LIMIT = 20.0
"""Bound of a log-ratio that is exponentiated, in both directions: exp(89) is inf in float32, which becomes NaN."""
TAIL_FLOOR = 1e-6
"""Smallest mass of a tail computed as 1 - P or 1 - Q; about the noise of 1 - Q from a float32 head."""
TRIAL_ROWS = 5
"""Number of rows on which users' losses are tried out."""


def forward_kl(
    teacher_logprobs: Tensor, student_logprobs: Tensor, *, tail: str, teacher_tail: Tensor | None = None,
    student_tail: Tensor | None = None,
) -> Tensor:
    """Return KL(teacher || student) per row, [T], nats: sum p log(p / q) over the outcomes of `tail`.

    Args:
        teacher_logprobs: [T, K], without gradient. Rounded to float16, which changes P slightly: with "bucket", P and
            the tail are rescaled to a sum of 1. -inf of teacher or student counts as -TAIL_LIMIT.
        student_logprobs: [T, K] of the same ids; they receive the gradient.
        tail: "bucket" (at least 0 up to rounding), "none" (any sign) or "renormalise", see above.
        teacher_tail: [T], log(1 - P) as sent by the teacher, -inf without mass outside of S.
        student_tail: [T], log(1 - Q) of `head_loss`, which receives a gradient as well. Only "bucket" uses the two
            tails; None: computed from the log-probabilities, see above.

    Raises:
        ValueError: the shapes differ, or `tail` is unknown.

    Source: Hinton et al., arXiv 1503.02531, for the full-vocabulary loss (K = V).
    """
    return _kl(*_outcomes(teacher_logprobs, student_logprobs, tail, teacher_tail, student_tail))


def reverse_kl(
    teacher_logprobs: Tensor, student_logprobs: Tensor, *, tail: str, teacher_tail: Tensor | None = None,
    student_tail: Tensor | None = None,
) -> Tensor:
    """Return KL(student || teacher) per row, nats: sum q log(q / p). Arguments, result, errors: as `forward_kl`.

    Source: Gu et al., MiniLLM, arXiv 2306.08543, for the full vocabulary.
    """
    teacher, student = _outcomes(teacher_logprobs, student_logprobs, tail, teacher_tail, student_tail)
    return _kl(student, teacher)


def within_tail(
    teacher_sampled: Tensor, student_sampled: Tensor, teacher_tail: Tensor, student_tail: Tensor, outside: Tensor
) -> Tensor:
    """Return a function of value 0, [T], whose gradient completes that of `forward_kl` with the bucket.

    Over the whole vocabulary the divergence is that with the bucket plus 1 - P times that within the tail, from
    q' = q / (1 - Q) to p' = p / (1 - P). For a token x that the student has sampled, if it is outside of S,

        ((1 - P) / (1 - Q) - p(x) / q(x)) grad log q'(x)

    has the expectation of the second part's gradient: with the constant alone it is 0, which reduces the variance. The
    only bias is that both ratios are at most TAIL_RATIO_LIMIT.

    Args:
        teacher_sampled: [T], log p(x), without gradient.
        student_sampled: [T], log q(x), with gradient.
        teacher_tail: [T], log(1 - P).
        student_tail: [T], log(1 - Q), with gradient.
        outside: bool [T], whether x was sampled and is outside of S; the others have no gradient.
    """
    log_p, log_q = finite(teacher_sampled), student_sampled.detach()
    within = torch.where(outside, student_sampled - student_tail, 0)
    tail_p = finite(teacher_tail).maximum(log_p)  # rounding may make a token larger than the whole tail
    ratio, ratio_of_tails = (
        torch.where(outside, difference, 0).exp().clamp(max=TAIL_RATIO_LIMIT)
        for difference in (log_p - log_q, tail_p - student_tail.detach())
    )
    return (ratio_of_tails - ratio) * (within - within.detach())


def jsd(
    teacher_logprobs: Tensor, student_logprobs: Tensor, *, beta: float, tail: str, teacher_tail: Tensor | None = None,
    student_tail: Tensor | None = None,
) -> Tensor:
    """Return the generalised Jensen-Shannon divergence per row, nats. Otherwise as `forward_kl`.

        beta KL(p || m) + (1 - beta) KL(q || m),   m = beta p + (1 - beta) q,   beta from 0 to 1

    Divided by beta it tends to KL(p || q) as beta -> 0, divided by 1 - beta to KL(q || p) as beta -> 1. The values
    at 0 and 1 are those limits, so the scale jumps there: a learning rate tuned at beta = 0.5 does not suit beta = 0.

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
    """Return `forward_kl` and `reverse_kl` with the bucket, and both entropies, without gradient, on its outcomes."""
    teacher, student = _outcomes(teacher_logprobs, student_logprobs, "bucket", teacher_tail, student_tail)
    log_ratio, p, q = teacher - student, teacher.exp(), student.exp()
    entropies = torch.special.entr(p.detach()).sum(-1), torch.special.entr(q.detach()).sum(-1)
    return Comparison((p * log_ratio).sum(-1), -(q * log_ratio).sum(-1), *entropies)


def k1(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """Return log q - log p of the sampled tokens, [T] and [T] -> [T]: unbiased for KL(q || p) if sampled from q.

    As a loss its expected gradient is 0; for its policy gradient see `score_weight`.

    Source of k1, k2 and k3: Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    teacher, student = _aligned(teacher_logprobs, student_logprobs)
    return student - teacher


def k2(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """Return (log q - log p)^2 / 2, [T] and [T] -> [T]. Its expected gradient over q is that of KL(q || p)."""
    return k1(teacher_logprobs, student_logprobs).square() / 2


def k3(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """Return p / q - 1 - log(p / q), [T] and [T] -> [T]: unbiased for KL(q || p), never negative.

    Its expected gradient over q is that of the other divergence, KL(p || q). Log-ratios are clamped to
    +-LOG_RATIO_LIMIT, without gradient beyond.
    """
    log_ratio = -k1(teacher_logprobs, student_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio


def absolute(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """Return |log q - log p|, [T] and [T] -> [T]. Its expected gradient over q is that of sum |q - p|, twice the total
    variation distance: the weight of every token is 1 or -1."""
    return k1(teacher_logprobs, student_logprobs).abs()


def k1_plus(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """Return the value of k1, unbiased for KL(q || p), with the gradient of k2, in expectation that of KL(q || p)."""
    return _straight_through(k1(teacher_logprobs, student_logprobs))


def k3_plus(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """Return the value of k3, unbiased and never negative, with the gradient of k2; see `k1_plus`."""
    return _straight_through(k1(teacher_logprobs, student_logprobs), k3(teacher_logprobs, student_logprobs))


def score_weight(estimator: str, teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """Return w of grad E_q[v] = E_q[w grad log q], where v is "k1", "k2" or "k3"; [T] and [T] -> [T], no gradient.

    w = v + dv / dlog q: the samples depend on q, and so does v. With l = log q - log p, w = l for k3, which therefore
    minimises KL(q || p), and w = l^2 / 2 + l for k2, which minimises E_q[l^2 / 2]. For k1 w = l without the slope 1,
    since E_q[grad log q] = 0.
    """
    log_ratio = k1(teacher_logprobs, student_logprobs).detach()
    return log_ratio.square() / 2 + log_ratio if estimator == "k2" else log_ratio


def tails_for(
    function: Callable[..., Tensor], teacher_tail: Tensor, student_tail: Tensor | None
) -> dict[str, Tensor | None]:
    """Return both tails as keyword arguments of a divergence; a user's function need not take `teacher_tail`."""
    parameters = inspect.signature(function).parameters.values()
    takes_it = any(each.name == "teacher_tail" or each.kind is each.VAR_KEYWORD for each in parameters)
    return {"student_tail": student_tail} | ({"teacher_tail": teacher_tail} if takes_it else {})


def check_loss_fn(function: Callable[..., Tensor], *, tail: str) -> None:
    """Try out `distillation.loss_fn`, a function like `forward_kl`, on random rows.

    Raises ConfigError: it does not return one value per row, or see `check_row_loss`.
    """
    key, generator = "distillation.loss_fn", torch.Generator().manual_seed(0)
    together = torch.randn(2, TRIAL_ROWS, 9, generator=generator, dtype=torch.float64).log_softmax(-1)[..., :4]

    def evaluate(rows: slice) -> tuple[Tensor, Tensor]:
        teacher, student = together[0, rows], together[1, rows].clone().requires_grad_()
        tails = [(1 - support_mass(logprobs)).log() for logprobs in (teacher, student)]
        values = function(teacher, student, tail=tail, **tails_for(function, *tails))
        if not isinstance(values, Tensor) or values.shape != student.shape[:1]:
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            rule = "must return one value per row, [T] for log-probabilities [T, K]"
            raise ConfigError(key, f"{rule}; for [{len(student)}, 4] it returned {found}", show_value=False)
        return student, values

    check_row_loss(key, evaluate)


def check_row_loss(key: str, call: Callable[[slice], tuple[Tensor, Tensor]]) -> None:
    """Check a user's loss of TRIAL_ROWS rows: `call` returns the log-probabilities of some of them and their loss.

    The head computes chunk by chunk: all rows together must have the values and gradients of each row alone.

    Raises ConfigError: `call` raises, or the loss has no gradient, is not finite, or mixes rows.
    """

    def evaluate(rows: slice) -> tuple[Tensor, Tensor]:
        try:
            logprobs, loss = call(rows)
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's code raises
            rule = f"raised {type(error).__name__} when it was tried: {error}"
            raise ConfigError(key, rule, show_value=False) from error
        if not loss.requires_grad:
            rule = "its result has no gradient for the student's log-probabilities"
            raise ConfigError(key, rule, show_value=False)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        if not (loss.isfinite().all() and gradient.isfinite().all()):
            raise ConfigError(key, "gave values or gradients that are not finite", show_value=False)
        return loss.detach(), gradient

    whole = evaluate(slice(None))
    alone = [torch.cat(parts) for parts in zip(*(evaluate(slice(i, i + 1)) for i in range(TRIAL_ROWS)), strict=True)]
    for what, found, expected in zip(("value", "gradient"), whole, alone, strict=True):
        if not torch.allclose(found, expected):
            rule = f"the {what} of a row must depend on that row alone; in a batch with others it changes by"
            raise ConfigError(key, f"{rule} {(found - expected).abs().max():.3g}", show_value=False)


def support_mass(logprobs: Tensor) -> Tensor:
    """Return the probability mass of the given ids, [T, K] -> [T]: P of a teacher, Q of a student."""
    return logprobs.exp().sum(-1)


def _straight_through(log_ratio: Tensor, value: Tensor | None = None) -> Tensor:
    """Return `value` (None: the log-ratio) with the gradient of log_ratio^2 / 2."""
    gradient = log_ratio.square() / 2
    return (log_ratio if value is None else value).detach() + (gradient - gradient.detach())


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return sum p (log p - log q) of log-probabilities, [T, N] and [T, N] -> [T]."""
    return (p.exp() * (p - q)).sum(-1)


def _outcomes(
    teacher: Tensor, student: Tensor, tail: str, teacher_tail: Tensor | None, student_tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the outcomes: K tokens, and with "bucket" the tail; two [T, K or K + 1]."""
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
    if teacher_tail is not None:  # float16 changes P by up to entropy / 2048; the minimum must be 0
        teacher = teacher.log_softmax(-1)
    return teacher, torch.cat([student, log_tail(student, student_tail)], -1)


def _aligned(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the student's type, `finite`. Raises ValueError: they would be broadcast."""
    if teacher.shape != student.shape:
        shapes = f"{tuple(teacher.shape)} (teacher) and {tuple(student.shape)} (student)"
        raise ValueError(f"log-probabilities must have one shape; got {shapes}")
    return finite(teacher.to(student.dtype)), finite(student)


def finite(logprobs: Tensor) -> Tensor:
    """Return log-probabilities with -TAIL_LIMIT for -inf, whose difference to another -inf would be NaN."""
    return logprobs.masked_fill(logprobs.isneginf(), -TAIL_LIMIT)


def log_tail(logprobs: Tensor, tail: Tensor | None = None) -> Tensor:
    """Return the log of the mass outside of S, [T, 1], with a lower bound; `tail` [T] is its exact value, if known."""
    # A plain clamp would also remove the gradient where the student needs more mass outside of S.
    if tail is not None:
        tail = tail[:, None].to(logprobs.dtype).clamp(min=MASKED_LOGIT)  # -inf minus itself would be NaN
        return tail.detach().clamp(min=-TAIL_LIMIT) + (tail - tail.detach())
    # Near 0, 1 - Q of a float32 head is noise of either sign, which log and 1/x would amplify: the floor bounds both.
    # With the detached shortfall added, value and slope are those of max(mass, floor), and Q still gets a gradient.
    mass = 1 - support_mass(logprobs)[:, None]
    return (mass + (TAIL_FLOOR - mass).clamp(min=0).detach()).log()

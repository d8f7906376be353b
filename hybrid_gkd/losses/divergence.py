"""Divergences between teacher and student as plain functions of [T, K] log-probabilities.

S is the teacher's top-k set of a row, p the teacher, q the student, P and Q their masses on S; both
come normalised over the whole vocabulary V. `tail` says what becomes of the rest of the vocabulary:

    bucket       it is one more outcome, of mass 1 - P and 1 - Q: a divergence of K + 1 outcomes, a lower
                 bound of the full one (data-processing inequality)
    none         it is left out: a plain sum over S; can be negative, and its minimum is q = p / P on S,
                 that is, it pushes all of the student's mass into S
    renormalise  p / P against q / Q: compares the shapes within S and leaves Q alone

With K = V the three agree. The functions return one value per row; the caller divides their sum over
valid response tokens by the number of those tokens in the global batch.

Shapes: T rows (packed response tokens), K teacher candidates.
"""

from __future__ import annotations

from torch import Tensor

STUDENT_TAIL_FLOOR = 1e-6
"""Smallest mass of the student's tail that enters a logarithm; about the float32 noise of 1 - Q."""


def forward_kl(teacher_logprobs: Tensor, student_logprobs: Tensor, *, tail: str) -> Tensor:
    """KL(teacher || student) per row, in nats.

        bucket       sum_S p log(p / q) + (1 - P) log((1 - P) / (1 - Q))
        none         sum_S p log(p / q)
        renormalise  sum_S p/P log((p/P) / (q/Q))

    Args:
        teacher_logprobs: [T, K], finite, without gradient. They arrive in float16, so P may come out slightly
            above 1; the teacher's tail is then empty.
        student_logprobs: [T, K] of the same ids; they receive the gradient.
        tail: "bucket", "none" or "renormalise", see above.

    Returns:
        [T], not reduced and not divided by anything. At least 0 for "renormalise", and for "bucket" as well
        up to rounding and STUDENT_TAIL_FLOOR.

    Raises:
        ValueError: the shapes differ, or an unknown `tail`.

    Source: Hinton et al., arXiv 1503.02531, for the full-vocabulary loss that K = V gives; "bucket" is that loss on
    the partition of the vocabulary into K single tokens and the rest.
    """
    if teacher_logprobs.ndim != 2 or teacher_logprobs.shape != student_logprobs.shape:
        raise ValueError(
            f"log-probabilities must both be [T, K]; got {tuple(teacher_logprobs.shape)} (teacher) and "
            f"{tuple(student_logprobs.shape)} (student)"
        )
    teacher_logprobs = teacher_logprobs.to(student_logprobs.dtype)
    if tail == "bucket":
        return _kl_sum(teacher_logprobs, student_logprobs) + _kl_tail(teacher_logprobs, student_logprobs)
    if tail == "none":
        return _kl_sum(teacher_logprobs, student_logprobs)
    if tail == "renormalise":
        return _kl_sum(_normalised(teacher_logprobs), _normalised(student_logprobs))
    raise ValueError(f"tail must be 'bucket', 'none' or 'renormalise'; got {tail!r}")


def support_mass(logprobs: Tensor) -> Tensor:
    """The probability mass on the given ids, [T, K] -> [T]: P of a teacher, Q of a student."""
    return logprobs.exp().sum(-1)


def _kl_sum(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """sum_S p (log p - log q), [T, K] -> [T]."""
    return (teacher_logprobs.exp() * (teacher_logprobs - student_logprobs)).sum(-1)


def _kl_tail(teacher_logprobs: Tensor, student_logprobs: Tensor) -> Tensor:
    """(1 - P) log((1 - P) / (1 - Q)), [T, K] -> [T]; 0 where the teacher has no tail."""
    teacher_tail = (1 - support_mass(teacher_logprobs)).clamp(min=0)
    student_tail = 1 - support_mass(student_logprobs)
    # log q = z - lse(z) carries the rounding of float32 logits (about 2e-6 at |z| = 32), so once Q is that close
    # to 1 the difference 1 - Q is noise, even of either sign, and log and 1/x would turn noise into the loss. The
    # floor bounds both. A plain clamp would also cut the gradient, just where the student must learn that
    # mass outside S exists; adding the detached shortfall keeps it: the value and the slope 1/x are those of
    # max(1 - Q, floor), and the slope still reaches Q.
    student_tail = student_tail + (STUDENT_TAIL_FLOOR - student_tail).clamp(min=0).detach()
    return teacher_tail.xlogy(teacher_tail) - teacher_tail * student_tail.log()


def _normalised(logprobs: Tensor) -> Tensor:
    return logprobs - logprobs.logsumexp(-1, keepdim=True)

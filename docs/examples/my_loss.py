"""Skewed KL (DistiLLM, arXiv 2402.03898): the teacher against a mixture of both, which bounds every token."""

import math

import torch

FRACTION = 0.1  # of the teacher in the mixture


def skewed_kl(teacher_logprobs, student_logprobs, *, tail, teacher_tail, student_tail):
    """KL(teacher || FRACTION teacher + (1 - FRACTION) student) per row, in nats; the tail is one outcome."""
    if tail != "bucket":
        raise ValueError(f"skewed_kl is for distillation.tail=bucket; got {tail!r}")
    p = torch.cat([teacher_logprobs, teacher_tail.clamp(min=-80)[:, None]], -1).to(student_logprobs.dtype)
    q = torch.cat([student_logprobs, student_tail[:, None]], -1)
    mixture = torch.logaddexp(p + math.log(FRACTION), q + math.log1p(-FRACTION))
    return (p.exp() * (p - mixture)).sum(-1)

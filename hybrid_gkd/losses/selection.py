"""Selection of tokens for the distillation term by the student's distribution, in its forward pass.

Functions return scores. The ceil(fraction R) tokens of each completion with the highest scores have weight 1: their
number, and so the denominator of the term, is known before the first backward pass, and the selection does not depend
on micro-batches and ranks.

Shapes: R trained tokens of a micro-batch, K teacher candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid_gkd.losses.head import RowStatistics


def student_entropy(student: RowStatistics, _signals: Mapping[str, Tensor]) -> Tensor:
    """Return the entropy of the student's distribution as a score, [R].

    Source: arXiv 2604.14084, in which half of the tokens are as effective as all of them.
    """
    return student.entropy


def confident_wrong(student: RowStatistics, signals: Mapping[str, Tensor]) -> Tensor:
    """Return q(x) (1 - p(x)) as a score, [R]: x is the student's most likely token, q the student, p the teacher.

    If x is not one of the teacher's candidates, p(x) is replaced by its upper bound: the probability of the least
    likely candidate, or of all tokens outside of the candidates if this is less. Source: arXiv 2604.14084.
    """
    logprobs, tail = signals["teacher.logprobs"], signals["teacher.tail_logprobs"]
    is_top = signals["teacher.ids"] == student.top_ids[:, None]
    outside = torch.minimum(logprobs[:, -1], tail)
    teacher = torch.where(is_top.any(1), logprobs.masked_fill(~is_top, -math.inf).amax(1), outside)
    return student.top_logprobs.exp() * (1 - teacher.exp())


def highest(scores: Tensor, lengths: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """Return the rows with the highest scores [R] of each completion, ascending, int64 [r]: `numbers` of its `lengths`.

    Of equal scores the earlier row is taken.
    """
    chosen, start = [], 0
    for part, number in zip(scores.split(list(lengths)), numbers, strict=True):
        chosen.append(part.argsort(descending=True, stable=True)[:number].sort().values + start)
        start += len(part)
    return torch.cat(chosen)

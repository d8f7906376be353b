"""What teacher and student would have said at the tokens of some held-out answers, for people to look at.

Shapes: R response tokens of an answer, s candidates that are shown of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hybrid_gkd.types import Sample, TopK

ANSWERS, TOKENS = 3, 200
"""Answers of a validation whose tokens are kept, and tokens from the beginning of each."""


def token_scores(
    sample: Sample, teacher: TopK, found: np.ndarray, decode: Callable[[list[int]], str]
) -> list[list[Any]]:
    """A row for each token: its text, KL(teacher, student) in nats, the teacher's s most likely tokens and those s of
    the teacher's candidates that the student finds most likely; a candidate is text, the teacher's probability, the
    student's. `found` [R, 2 + 3 s] is what `Actor.compute_divergences` gives.
    """
    shown = (found.shape[1] - 2) // 3
    text_of = functools.cache(lambda token: decode([token]))
    rows = []
    for at, token in enumerate(sample.trained_ids[:TOKENS].tolist()):
        ids, own = teacher.ids[at].tolist(), np.exp(teacher.logprobs[at].astype(np.float64))
        of_teacher, of_student, columns = found[at, 2:].reshape(3, shown)
        pairs = [*enumerate(of_teacher), *zip(columns.astype(int).tolist(), of_student, strict=True)]
        candidates = [[text_of(ids[k]), round(float(own[k]), 4), round(float(np.exp(q)), 4)] for k, q in pairs]
        rows.append([text_of(token), float(f"{found[at, 0]:.3g}"), candidates[:shown], candidates[shown:]])
    return rows

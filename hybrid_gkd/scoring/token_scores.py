"""Token-level view of held-out completions: the most likely candidates of teacher and student at each token.

Shapes: R tokens of a completion, s candidates shown per model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hybrid_gkd.types import Sample, TopK

ANSWERS, TOKENS = 3, 200
"""Completions of a validation whose tokens are shown, and leading tokens of each."""


def token_scores(
    sample: Sample, teacher: TopK, found: np.ndarray, decode: Callable[[list[int]], str]
) -> list[list[Any]]:
    """Return one row per token: text, KL(teacher, student) in nats, the teacher's candidates, the student's candidates.

    The s candidates of either are the most likely ones by that model among the teacher's top k; a candidate is (text,
    teacher's probability, student's probability). `found` [R, 2 + 3 s] is the result of `Actor.compute_divergences`.
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

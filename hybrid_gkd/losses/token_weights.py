"""Weights of single tokens in the distillation term; the names of the built-in ones are in table.py.

A weight is known either before the teacher has scored a completion (`position`), when it has (functions of users), or
from the student's distribution in its forward pass. Functions of the last kind return scores, and the highest
ceil(fraction R) of each completion have weight 1: so many that the denominator of the term is known before the first
backward pass, and the selection depends neither on micro-batches nor on ranks.

Shapes: R trained tokens of a completion or of a micro-batch, K teacher candidates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.losses.table import TokenWeights
from hybrid_gkd.types import TopK

KEY = "distillation.token_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSignals:
    """What a function of weights reads of one completion."""

    token_ids: np.ndarray
    """int32 [R], the trained tokens."""
    positions: np.ndarray
    """int64 [R], their numbers within the completion: 0 to R - 1."""
    length: int
    """R."""
    logprobs: np.ndarray | None = None
    """float32 [R], log-probabilities of the tokens under the student that wrote them; None for a given answer."""
    teacher: TopK | None = None
    """The teacher's candidates, the mass outside of them, and its log-probabilities of the tokens; None for
    `position`."""


class RowStatistics(NamedTuple):
    """The student's distribution at the rows of a micro-batch."""

    entropy: Tensor
    """float32 [R], nats."""
    top_ids: Tensor
    """int64 [R], the most likely tokens."""
    top_logprobs: Tensor
    """float32 [R], their log-probabilities."""


def position(signals: TokenSignals, *, fraction: float) -> np.ndarray:
    """Weight 1 for the first ceil(fraction R) tokens of a completion, 0 for the others, float32 [R].

    Source: arXiv 2606.22600, in which the first 30 % of an answer teach nearly as much as all of it.
    """
    return (signals.positions < num_selected(fraction, signals.length)).astype(np.float32)


def student_entropy(student: RowStatistics, _signals: Mapping[str, Tensor]) -> Tensor:
    """The entropy of the student's distribution as a score, [R].

    Source: arXiv 2604.14084, in which half of the tokens teach as much as all of them.
    """
    return student.entropy


def confident_wrong(student: RowStatistics, signals: Mapping[str, Tensor]) -> Tensor:
    """q(x) (1 - p(x)) as a score, [R]: x is the student's most likely token, q the student, p the teacher.

    Where x is none of the teacher's candidates, p(x) is its upper bound: the least likely candidate's probability, or
    that of all tokens outside of them if this is less. Source: arXiv 2604.14084.
    """
    logprobs, tail = signals["teacher.logprobs"], signals["teacher.tail_logprobs"]
    is_top = signals["teacher.ids"] == student.top_ids[:, None]
    outside = torch.minimum(logprobs[:, -1], tail)
    teacher = torch.where(is_top.any(1), logprobs.masked_fill(~is_top, -math.inf).amax(1), outside)
    return student.top_logprobs.exp() * (1 - teacher.exp())


def num_selected(fraction: float, count: int) -> int:
    """ceil(fraction count), where a product such as 0.1 * 30 that is rounded up counts as 3."""
    return math.ceil(fraction * count - 1e-9)


def highest(scores: Tensor, lengths: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """Rows with the highest scores [R] of each completion: `numbers` of its `lengths`, ascending, int64 [r].

    Of equal scores the earlier row is taken.
    """
    chosen, start = [], 0
    for part, number in zip(scores.split(list(lengths)), numbers, strict=True):
        chosen.append(part.argsort(descending=True, stable=True)[:number].sort().values + start)
        start += len(part)
    return torch.cat(chosen)


def evaluate(row: TokenWeights, signals: TokenSignals) -> np.ndarray:
    """Weights of a completion, float32 [R]. Raises ConfigError: they are not one finite value of at least 0 a token."""
    weights = np.asarray(row.function(signals, **row.options))
    if weights.shape != (signals.length,):
        rule = f"must return one weight per token, [{signals.length}]; got {list(weights.shape)}"
        raise ConfigError(KEY, rule, show_value=False)
    weights = weights.astype(np.float32)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise ConfigError(KEY, "must return finite weights of at least 0", show_value=False)
    return weights


def check_token_weights(row: TokenWeights, *, topk: int) -> None:
    """Try out a function of the user's on a completion of five tokens. Raises ConfigError if it fails."""
    rng = np.random.default_rng(0)
    each = np.log(rng.dirichlet(np.ones(topk + 1), 5).astype(np.float32))
    teacher = TopK(
        ids=np.tile(np.arange(topk, dtype=np.int32), (5, 1)), logprobs=-np.sort(-each[:, :topk], 1),
        tail_logprobs=each[:, topk], sampled_logprobs=each[:, 0],
    )
    signals = TokenSignals(
        token_ids=np.arange(5, dtype=np.int32), positions=np.arange(5), length=5, logprobs=each[:, 0], teacher=teacher
    )
    try:
        evaluate(row, signals)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        rule = f"raised {type(error).__name__} when it was tried: {error}"
        raise ConfigError(KEY, rule, show_value=False) from error

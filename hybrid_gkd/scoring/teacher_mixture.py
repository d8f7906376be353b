"""Several teachers of one sample: the weighted mean of their probabilities as one signal, or a signal of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from hybrid_gkd.scoring.scorer import settle
from hybrid_gkd.scoring.teacher_router import TeacherGroup
from hybrid_gkd.scoring.teacher_scorer import TeacherScorer
from hybrid_gkd.types import Pair, Sample, Scored, TopK


class MixtureScorer(TeacherGroup):
    """Scores each sample with all teachers: the `members` by name, each with its weight."""

    def __init__(self, members: Mapping[str, tuple[float, TeacherScorer]]):
        super().__init__({name: scorer for name, (_, scorer) in members.items()})
        total = sum(weight for weight, _ in members.values())
        self.weights = [weight / total for weight, _ in members.values()]

    def submit(self, pairs: list[Pair]) -> list[Future[Any]]:
        """Send the samples to every teacher without waiting for scores. Raises the clients' errors."""
        by_teacher = [scorer.submit(pairs) for scorer in self.scorers.values()]
        return [
            _combined(futures, functools.partial(self.join, sample=sample))
            for (_, sample), *futures in zip(pairs, *by_teacher, strict=True)
        ]

    def join(self, scores: Sequence[TopK], sample: Sample) -> Scored:
        """Return the scores of a sample from those of every teacher."""
        given = sample.topk("student_topk").ids if "student_topk" in sample.signals else None
        return mixture(scores, self.weights, given)


class SumScorer(MixtureScorer):
    """Scores each sample with all teachers, whose losses are terms of their own."""

    def join(self, scores: Sequence[TopK], sample: Sample) -> Scored:
        """Return the scores of every teacher by signal."""
        return {f"teacher/{name}": each for name, each in zip(self.scorers, scores, strict=True)}


def _combined(futures: Sequence[Future[TopK]], join: Callable[[Sequence[TopK]], Scored]) -> Future[Scored]:
    """Return a future of the joined results of all futures; it has the error of the first one that fails."""
    found: Future[Scored] = Future()

    def on_done(future: Future[TopK]) -> None:
        if future.exception() is not None:
            settle(found, future.result)
        elif all(each.done() for each in futures):
            settle(found, lambda: join([each.result(0) for each in futures]))

    for future in futures:
        future.add_done_callback(on_done)
    return found


def mean_scores(scores: Scored, weights: Mapping[str, float]) -> TopK:
    """Return the scores of one teacher, or the mixture of several, whose `weights` are by signal."""
    if isinstance(scores, TopK):
        return scores
    total = sum(weights[name] for name in scores)
    return mixture([*scores.values()], [weights[name] / total for name in scores])


def mixture(scores: Sequence[TopK], weights: Sequence[float], given_ids: np.ndarray | None = None) -> TopK:
    """Return the weighted mean of teachers' probabilities on the K most likely of all their candidates.

    A teacher's mass outside its own candidates stays in the tail. The probability of a token that is not a candidate of
    that teacher is therefore too low, by at most the weighted probability of its last candidate. Candidates and tail
    have mass 1.

    Args:
        scores: [R, K] each.
        weights: weight of each teacher; their sum is 1.
        given_ids: [R, G], candidates of every teacher that are always kept.
    """
    num_rows, topk = scores[0].ids.shape
    ids = np.concatenate([each.ids for each in scores], 1)
    masses = np.concatenate(
        [weight * np.exp(each.logprobs, dtype=np.float64) for weight, each in zip(weights, scores, strict=True)], 1
    )
    order = np.argsort(ids, 1, kind="stable")
    ids, masses = np.take_along_axis(ids, order, 1), np.take_along_axis(masses, order, 1)
    repeats = np.zeros(ids.shape, bool)
    repeats[:, 1:] = ids[:, 1:] == ids[:, :-1]
    column = np.arange(ids.shape[1])
    first = np.maximum.accumulate(np.where(repeats, 0, column), 1)  # column of the first one with the same id
    sums = np.zeros(ids.shape)
    np.add.at(sums, (np.arange(num_rows)[:, None], first), masses)
    sums[repeats] = -1.0  # after every candidate
    rank = sums
    if given_ids is not None:
        rows = (int(ids.max(initial=0)) + 1) * np.arange(num_rows)[:, None]
        rank = sums + (np.isin(ids + rows, given_ids + rows) & ~repeats)  # before every other one
    order = np.argsort(-rank, 1, kind="stable")
    ids, sums = np.take_along_axis(ids, order, 1), np.take_along_axis(sums, order, 1)
    log_mean = functools.partial(_log_mean, weights)
    left_out = np.maximum(sums[:, topk:], 0.0).sum(1)
    with np.errstate(divide="ignore"):  # -inf where there is no mass
        logprobs = np.log(sums[:, :topk])
        tail = np.log(np.exp(log_mean([each.tail_logprobs for each in scores])) + left_out)
    sampled = log_mean([each.sampled_logprobs for each in scores])
    return TopK(
        ids=ids[:, :topk], logprobs=logprobs.astype(np.float32), tail_logprobs=tail.astype(np.float32),
        sampled_logprobs=sampled.astype(np.float32),
    )


def _log_mean(weights: Sequence[float], logprobs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the log of the weighted mean of probabilities, float64 [R]."""
    terms = [np.log(weight) + each.astype(np.float64) for weight, each in zip(weights, logprobs, strict=True)]
    return np.asarray(np.logaddexp.reduce(terms, 0))

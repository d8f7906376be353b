"""Scorers: each computes one signal of samples.

Teachers are asynchronous and have their own deadlines (teacher_scorer.py); the other scorers are synchronous.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Protocol, TypeVar

from hybrid_gkd.types import Pair, Plan, Sample, SampleId, Signal

if TYPE_CHECKING:
    from hybrid_gkd.workers.batches import Batches

S = TypeVar("S", bound=Signal)
T = TypeVar("T")


class Scorer(Protocol):
    """Computes one signal of samples."""

    name: str
    """Name of the signal, one of `SIGNALS`."""

    def submit(self, pairs: list[Pair]) -> Sequence[Future[Signal]]:
        """Queue samples for scoring; return one future per sample, in order."""


class WorkersScorer:
    """Scores samples with a model of the workers: student, reference policy or critic.

    Args:
        name: name of the signal.
        compute: a forward pass of the worker group.
        batches: plans the micro-batches.
    """

    def __init__(self, name: str, compute: Callable[[Plan], Mapping[SampleId, Signal]], batches: Batches):
        self.name, self.compute, self.batches = name, compute, batches

    def submit(self, pairs: list[Pair]) -> list[Future[Signal]]:
        """Score the samples synchronously. Raises the errors of the worker group."""
        bare = [dataclasses.replace(sample, signals={}) for _, sample in pairs]  # a forward pass needs no signals
        found = self.compute(self.batches.plan(bare))
        return [completed_future(found[sample.id]) for sample in bare]


def completed_future(signal: S) -> Future[S]:
    """Return a completed future."""
    future: Future[S] = Future()
    future.set_result(signal)
    return future


def settle(future: Future[T], compute: Callable[[], T]) -> None:
    """Give a future the result of a function, or its error. A future that is done already stays as it is."""
    with contextlib.suppress(InvalidStateError):
        try:
            result = compute()
        except Exception as error:  # the trainer waits for it
            future.set_exception(error)
        else:
            future.set_result(result)


def scored(scorer: Scorer, pairs: Sequence[Pair]) -> list[Sample]:
    """Add the signal of a synchronous scorer to the samples that lack it; return all samples."""
    missing = [pair for pair in pairs if scorer.name not in pair[1].signals]
    futures = scorer.submit(missing) if missing else []
    found = {sample.id: future.result(0) for (_, sample), future in zip(missing, futures, strict=True)}
    return [
        sample.with_signals(**{scorer.name: found[sample.id]}) if sample.id in found else sample for _, sample in pairs
    ]

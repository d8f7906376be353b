"""Several teachers as one scorer: each sample is scored by the teacher of its row."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.scoring.teacher_scorer import TeacherScorer, request_metrics
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import Pair


class TeacherGroup(TeacherScorer):
    """Several scorers as one, by name, which is part of the names of metrics."""

    def __init__(self, scorers: Mapping[str, TeacherScorer]):
        self.scorers = scorers

    def describe(self) -> str:
        """Return the present state of every teacher."""
        return "; ".join(f"{name}: {scorer.describe()}" for name, scorer in self.scorers.items())

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude requests in this context from the metrics."""
        with contextlib.ExitStack() as stack:
            for scorer in self.scorers.values():
                stack.enter_context(scorer.uncounted())
            yield

    def drain(self) -> dict[str, TeacherMetrics]:
        """Return the counters since the last call, by the names of scorers and their clients."""
        found = ((name, scorer.drain().items()) for name, scorer in self.scorers.items())
        return {f"/{name}{below}": counts for name, each in found for below, counts in each}

    def take_metrics(self, clock: Clock) -> dict[str, float]:
        """Return the metrics of the requests to all teachers since the last call, and latency and tokens of each."""
        counts = self.drain()
        metrics = request_metrics(functools.reduce(operator.add, counts.values()), clock)
        total = sum(each.scored_tokens for each in counts.values())
        for name, each in counts.items():
            if each.requests:
                metrics[f"teacher{name}/latency"] = float(np.median(each.latencies))
            if total:
                metrics[f"teacher{name}/token_fraction"] = each.scored_tokens / total
        return metrics


class TeacherRouter(TeacherGroup):
    """Scores each sample with the scorer whose name is its `Task.teacher`."""

    def submit(self, pairs: list[Pair]) -> list[Future[Any]]:
        """Send each sample to its teacher without waiting for scores. Raises the clients' errors."""
        found = dict[int, Future[Any]]()
        for key, scorer in self.scorers.items():
            places = [place for place, (task, _) in enumerate(pairs) if task.teacher == key]
            found |= zip(places, scorer.submit([pairs[place] for place in places]), strict=True)
        return [found[place] for place in range(len(pairs))]

"""The teacher as a scorer: what it reads of a sample, and the scores that are under way.

Who unblocks whom: `take_scores` is unblocked by any score that arrives, by the end of a local teacher (`check`), or by
its inactivity timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from hybrid_gkd.errors import TeacherTimeout
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import Pair, Reading, Sample, SampleId, Task, TopK

LATE_SECONDS = 30.0
"""Grace period after the client's own deadline, by which it ends every request."""
CHECK_SECONDS = 1.0
"""Seconds between two checks of a local teacher while the trainer waits for scores."""
View = Callable[[Task, Sample], Reading]
"""What a teacher reads for a sample: its own prompt, template or tokenizer, and which tokens of it are scored."""
Scores = dict[SampleId, Future[TopK]]
"""Scores under way, until they are taken."""


def completion_view(task: Task, sample: Sample) -> Reading:
    """Return the sample as it is, behind the teacher's own prompt where the task has one."""
    token_ids, positions = sample.tokens, sample.positions
    if task.teacher_ids is not None:
        own = len(task.token_ids)
        token_ids = np.concatenate([task.teacher_ids, token_ids[own:]])
        positions = positions + (len(task.teacher_ids) - own)
    is_given = sample.status == "given"
    return Reading(token_ids=token_ids, positions=positions, name=str(sample.id), keep=is_given)


class Teacher(Protocol):
    """What a scorer needs of a teacher: a `TeacherClient`, or one with a store of scores in front of it."""

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        """Queue readings for scoring; return a future for each, in their order."""

    def describe(self) -> str:
        """Return what is known of every server now."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Within it, requests do not count in the metrics."""

    def drain_metrics(self) -> TeacherMetrics:
        """Return counters since the last call."""


class TeacherScorer:
    """Scores samples by a teacher service.

    Args:
        client: has shaken hands; the caller closes it.
        view: what the teacher reads.
    """

    name = "teacher"

    def __init__(self, client: Teacher, view: View = completion_view):
        self.client, self.view = client, view

    def submit(self, pairs: list[Pair]) -> list[Future[TopK]]:
        """Send samples without waiting for the scores. Raises the client's errors."""
        return self.client.submit([self.view(task, sample) for task, sample in pairs])

    def start(self, pairs: list[Pair]) -> Scores:
        """Send samples; return their scores to come by identity."""
        return dict(zip((sample.id for _, sample in pairs), self.submit(pairs), strict=True))

    def take_scores(
        self, scores: Scores, enough: int, *, timeout: Timeout, check: Callable[[], None]
    ) -> dict[SampleId, TopK]:
        """Remove and return all scores that have arrived, as soon as there are `enough`.

        Args:
            timeout: seconds without any score after which the client gives up by itself.
            check: raises if the teacher is known to have ended.

        Raises the client's errors, and TeacherTimeout a grace period after `timeout`.
        """
        late = Timeout(timeout.seconds + LATE_SECONDS, f"{timeout.key}, a grace period")
        deadline = time.monotonic() + late.seconds
        found: dict[SampleId, TopK] = {}
        total = len(scores)

        def detail() -> str:
            return f"{len(scores)} of {total} samples are not scored yet; {self.client.describe()}"

        with waiting("the teacher", timeout, detail) as waited:
            while True:
                arrived = [each for each, future in scores.items() if future.done()]
                found |= {each: scores.pop(each).result(0) for each in arrived}
                if len(found) >= enough:
                    return found
                if arrived:
                    deadline = time.monotonic() + late.seconds
                    waited.restart_timeout()
                elif time.monotonic() > deadline:
                    raise TeacherTimeout(f"{len(scores)} samples were not scored and not refused in {late}")
                check()
                until = FIRST_EXCEPTION if len(found) + len(scores) == enough else FIRST_COMPLETED
                wait(scores.values(), timeout=CHECK_SECONDS, return_when=until)

    def uncounted(self) -> AbstractContextManager[None]:
        """Within it, requests do not count in the metrics."""
        return self.client.uncounted()

    def take_metrics(self, clock: Clock) -> dict[str, float]:
        """Return the metrics of the requests since the last call; their times become spans of the clock."""
        found = self.client.drain_metrics()
        in_flight = clock.requests(found.requests, until=found.complete_until, steps=found.steps)
        seen = {}
        if found.queue_lengths:  # a step may be shorter than the second between two messages
            seen["teacher/queue_length"] = float(np.mean(found.queue_lengths))
            seen["teacher/engine_busy"] = float(np.mean(found.engine_busy))
        if found.requests:  # the last rollouts may have been scored before
            names = ("teacher/latency", "teacher/latency_p95", "teacher/latency_p99")
            seen |= dict(zip(names, np.percentile(found.latencies, (50, 95, 99)).tolist(), strict=True))
            seen["teacher/bytes_per_token"] = found.bytes_received / found.scored_tokens
        if in_flight:
            seen["teacher/tokens_per_second"] = found.tokens / in_flight
        if found.cache_lookups:
            seen["teacher/cache_hit_fraction"] = found.cache_hits / found.cache_lookups
        return seen | {"teacher/retries": float(found.retries)}

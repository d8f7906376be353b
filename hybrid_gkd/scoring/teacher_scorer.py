"""The teacher as a scorer: views of samples, and pending scores.

`take_scores` is unblocked by any arriving score, by the end of a local teacher (`check`), or by its inactivity timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hybrid_gkd.errors import TeacherTimeout
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import Pair, Reading, Sample, SampleId, Scored, Task, TopK

GRACE_SECONDS = 30.0
"""Margin after the client's own deadline, by which it completes every request."""
CHECK_SECONDS = 1.0
"""Seconds between two checks of a local teacher while the trainer waits for scores."""
View = Callable[[Task, Sample], Reading]
"""Maps a task and a sample to what the teacher reads: its own prompt, template or tokenizer, and scored positions."""
Scores = dict[SampleId, Future[Any]]
"""Pending scores by sample: futures of `Scored`."""


def completion_view(task: Task, sample: Sample) -> Reading:
    """Return the sample's tokens, with the teacher's own prompt if the task has one."""
    token_ids, positions = sample.tokens, sample.positions
    if task.teacher_ids is not None:
        own = len(task.token_ids)
        token_ids = np.concatenate([task.teacher_ids, token_ids[own:]])
        positions = positions + (len(task.teacher_ids) - own)
    given_ids = sample.topk("student_topk").ids if "student_topk" in sample.signals else None
    return Reading(
        token_ids=token_ids, positions=positions, name=str(sample.id), keep=sample.status == "given",
        given_ids=given_ids,
    )  # fmt: skip


class Teacher(Protocol):
    """Interface of a teacher: implemented by `TeacherClient`, `CachedTeacher`, `TeacherInTurn` and `OwnTeacher`."""

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        """Queue readings for scoring; return one future per reading, in order."""

    def describe(self) -> str:
        """Return the present state of every server, for messages."""

    def uncounted(self) -> AbstractContextManager[None]:
        """Exclude requests in this context from the metrics."""

    def drain_metrics(self) -> TeacherMetrics:
        """Return counters since the last call."""


class TeacherScorer:
    """Scores samples with a teacher service.

    Args:
        client: client after its handshake; the caller closes it.
        view: maps samples to what the teacher reads.
    """

    name = "teacher"

    def __init__(self, client: Teacher, view: View = completion_view):
        self.client, self.view = client, view

    def submit(self, pairs: list[Pair]) -> list[Future[Any]]:
        """Send samples without waiting for their `Scored`. Raises the client's errors."""
        return self.client.submit([self.view(task, sample) for task, sample in pairs])

    def start(self, pairs: list[Pair]) -> Scores:
        """Send samples; return their pending scores."""
        return dict(zip((sample.id for _, sample in pairs), self.submit(pairs), strict=True))

    def take_scores(
        self, scores: Scores, enough: int, *, timeout: Timeout, check: Callable[[], None]
    ) -> dict[SampleId, Scored]:
        """Wait for at least `enough` scores; remove and return all that have arrived.

        Args:
            timeout: the client's inactivity timeout.
            check: raises if the teacher has ended.

        Raises the client's errors, and TeacherTimeout a grace period after `timeout`.
        """
        limit = Timeout(timeout.seconds + GRACE_SECONDS, f"{timeout.key}, a grace period")
        deadline = time.monotonic() + limit.seconds
        found: dict[SampleId, Scored] = {}
        total = len(scores)

        def detail() -> str:
            return f"{len(scores)} of {total} samples are not scored yet; {self.describe()}"

        with waiting("the teacher", timeout, detail) as waited:
            while True:
                arrived = [each for each, future in scores.items() if future.done()]
                found |= {each: scores.pop(each).result(0) for each in arrived}
                if len(found) >= enough:
                    return found
                if arrived:
                    deadline = time.monotonic() + limit.seconds
                    waited.restart_timeout()
                elif time.monotonic() > deadline:
                    raise TeacherTimeout(
                        f"{len(scores)} samples were neither scored nor rejected in {limit}, a defect of the teacher "
                        "client: report it with run.log"
                    )
                check()
                until = FIRST_EXCEPTION if len(found) + len(scores) == enough else FIRST_COMPLETED
                wait(scores.values(), timeout=CHECK_SECONDS, return_when=until)

    def describe(self) -> str:
        """Return the present state of every server, for messages."""
        return self.client.describe()

    def uncounted(self) -> AbstractContextManager[None]:
        """Exclude requests in this context from the metrics."""
        return self.client.uncounted()

    def drain(self) -> dict[str, TeacherMetrics]:
        """Return the counters since the last call, by the name of each client below this scorer's own."""
        return {"": self.client.drain_metrics()}

    def take_metrics(self, clock: Clock) -> dict[str, float]:
        """Return the metrics of the requests since the last call, and add their spans to the clock."""
        return request_metrics(self.drain()[""], clock)


def request_metrics(found: TeacherMetrics, clock: Clock) -> dict[str, float]:
    """Return the metrics of counters, and add the spans of their requests to the clock."""
    in_flight = clock.requests(found.requests, until=found.complete_until, steps=found.steps)
    seen = {}
    if found.queue_lengths:  # absent if no status message (one per second) arrived during the step
        seen["teacher/queue_length"] = float(np.mean(found.queue_lengths))
        seen["teacher/engine_busy"] = float(np.mean(found.engine_busy))
    if found.requests:  # absent if all samples were scored in an earlier step
        names = ("teacher/latency", "teacher/latency_p95", "teacher/latency_p99")
        seen |= dict(zip(names, np.percentile(found.latencies, (50, 95, 99)).tolist(), strict=True))
    if found.bytes_received and found.scored_tokens:  # absent without a service
        seen["teacher/bytes_per_token"] = found.bytes_received / found.scored_tokens
    if in_flight:
        seen["teacher/tokens_per_second"] = found.tokens / in_flight
    if found.cache_lookups:
        seen["teacher/cache_hit_fraction"] = found.cache_hits / found.cache_lookups
    if total := found.aligned_tokens:
        seen["teacher/tokens/matched_fraction"] = found.matched_tokens / total
        seen["teacher/tokens/span_fraction"] = found.span_tokens / total
        seen["teacher/tokens/unscored_fraction"] = 1 - (found.matched_tokens + found.span_tokens) / total
    return seen | {"teacher/retries": float(found.retries)}

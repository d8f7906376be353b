"""The student's own weights as the teacher: scored by the training workers, without a service."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from hybrid_gkd.config import Config
from hybrid_gkd.runtime.spans import Clock, current_step
from hybrid_gkd.scoring.scorer import completed_future
from hybrid_gkd.teacher.protocol import check_scores
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import Reading, Sample, SampleId, TopK
from hybrid_gkd.workers.batches import Batches

if TYPE_CHECKING:
    from hybrid_gkd.workers.group import WorkerGroup


class OwnTeacher:
    """Teacher with the weights of `teacher.source` on the training workers; implements the protocol `Teacher`.

    `submit` scores synchronously, under the weights at the time of the call: call it while the workers are idle.
    `num_ids`: number of token ids that may be candidates.
    """

    def __init__(self, config: Config, group: WorkerGroup, clock: Clock, *, num_ids: int):
        self.group, self.clock, self.num_ids = group, clock, num_ids
        self.source, self.topk = config.actor_rollout_ref.teacher.source, config.distillation.topk
        self.batches = Batches(config, config.actor_rollout_ref.actor, group)
        self._metrics, self._is_counted = TeacherMetrics(), True

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        """Return the scores of the readings. Raises the worker group's errors; BadTeacherReply: see `check_scores`."""
        if not readings:
            return []
        samples, started = [_as_sample(number, each) for number, each in enumerate(readings)], time.monotonic()
        with self.clock.span("wait_prev_teacher") if self._is_counted else contextlib.nullcontext():
            found = self.group.compute_own_topk(self.batches.plan(samples))
        signals = [found[sample.id] for sample in samples]
        for reading, sample, scores in zip(readings, samples, signals, strict=True):
            check_scores(
                scores.ids, scores.logprobs, scores.tail_logprobs, scores.sampled_logprobs,
                num_rows=sample.num_trained, topk=self.topk, vocab_size=self.num_ids, server=self.describe(),
                request=reading.name,
            )
        if self._is_counted:
            self._metrics.requests.append((started, time.monotonic()))
            self._metrics.steps.append(current_step.get())
            self._metrics.tokens += sum(each.num_tokens for each in readings)
            self._metrics.scored_tokens += sum(sample.num_trained for sample in samples)
        return [completed_future(scores) for scores in signals]

    def describe(self) -> str:
        """Return a description for messages."""
        return f"the student as its own teacher ({self.source})"

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude requests in this context from the metrics."""
        self._is_counted = False
        try:
            yield
        finally:
            self._is_counted = True

    def drain_metrics(self) -> TeacherMetrics:
        """Return counters since the last call."""
        found, self._metrics = self._metrics, TeacherMetrics()
        return found


def _as_sample(number: int, reading: Reading) -> Sample:
    """Return a sample whose trained tokens are the scored ones of a reading."""
    mask = np.zeros(reading.num_tokens, bool)
    mask[reading.positions] = True
    versions = np.full(len(reading.positions), -1, np.int32)
    return Sample(
        id=SampleId(0, number, 0), tokens=np.asarray(reading.token_ids, np.int32), loss_mask=mask, versions=versions,
        status="given",
    )  # fmt: skip

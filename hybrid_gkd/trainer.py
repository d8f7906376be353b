"""On-policy distillation: read this first.

The loop is `PPOTrainer.fit`. This class replaces what a rollout is worth: instead of rewards and
advantages, the teacher's most likely tokens at every position of every response, and a divergence between
the two distributions that the student minimises.

    rollout engine ──finished sequences──> TeacherClient ──> teacher service
          ^                                      │ top-k log-probabilities
          └──publish── actor <── update <────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import numpy as np

from hybrid_gkd.errors import TeacherTimeout, TrainingError
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.teacher_client import TeacherClient
from hybrid_gkd.types import Rollout, Sequence, TeacherTopK, TrainSequence

LATE_SECONDS = 30.0
"""The client answers every request before its own deadline; this much later it is taken for dead."""
CHECK_SECONDS = 1.0
"""How often a teacher that this run started is looked after while the trainer waits for scores."""


class GKDTrainer(PPOTrainer):
    """Generalised knowledge distillation (arXiv 2306.13649), fully on-policy.

    Args:
        teacher: a client that has shaken hands; the caller closes it.
        check_teacher: raises if the teacher is known to have ended; called while waiting for it.
        others: see `PPOTrainer`.
    """

    def __init__(
        self, *args: Any, teacher: TeacherClient, check_teacher: Callable[[], None] = lambda: None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.teacher = teacher
        self.check_teacher = check_teacher
        self._pending: dict[int, Future[TeacherTopK]] = {}
        self._first_submit: float | None = None
        if self.config.actor_rollout_ref.teacher.overlap_rollout:
            self.on_finished.append(self._submit)

    def _update_actor(self, rollout: Rollout) -> dict[str, float]:
        """Collect the teacher's scores of the rollout and take the distillation step on all of it.

        Raises:
            TeacherError: a sequence could not be scored; nothing has been trained.
        """
        self._submit([s for s in rollout.sequences if s.index not in self._pending])
        waited_from = time.perf_counter()
        with self.clock.span("wait_prev_teacher"):
            self._wait_for_scores()
        metrics = self._teacher_metrics(rollout, time.perf_counter() - waited_from)
        scored = [TrainSequence(sequence=s, teacher=self._pending.pop(s.index).result(0)) for s in rollout.sequences]
        if self._pending:
            raise TrainingError(f"{len(self._pending)} scored sequences belong to no rollout")
        with self.clock.span("update_actor"):
            return self._train(scored) | metrics

    def _submit(self, sequences: list[Sequence]) -> None:
        """Send sequences to the teacher without waiting for it."""
        if not sequences:
            return
        if self._first_submit is None:
            self._first_submit = time.perf_counter()
        for sequence, future in zip(sequences, self.teacher.submit(sequences), strict=True):
            self._pending[sequence.index] = future

    def _wait_for_scores(self) -> None:
        """Wait for all scores, or for the first error; never longer than a request may take without news."""
        patience = self.config.actor_rollout_ref.teacher.request_timeout + LATE_SECONDS
        waiting, deadline = set(self._pending.values()), time.monotonic() + patience
        while waiting:
            done, waiting = wait(waiting, timeout=CHECK_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result(0)  # raises what the client reported
            if done:
                deadline = time.monotonic() + patience
            elif time.monotonic() > deadline:
                raise TeacherTimeout(f"{len(waiting)} sequences were not scored and not refused in {patience:.0f} s")
            if waiting:
                self.check_teacher()

    def _teacher_metrics(self, rollout: Rollout, waited: float) -> dict[str, float]:
        assert self._first_submit is not None
        total = time.perf_counter() - self._first_submit
        self._first_submit = None
        self.clock.add("get_teacher_knowledge", total)
        found = self.teacher.drain_metrics()
        num_response_tokens = sum(len(s.response_ids) for s in rollout.sequences)
        return {
            "teacher/latency": float(np.median(found.latencies)),
            "teacher/latency_p95": float(np.percentile(found.latencies, 95)),
            "teacher/tokens_per_second": found.tokens / total,
            "teacher/retries": float(found.retries),
            "teacher/bytes_per_token": found.bytes_received / num_response_tokens,
            "teacher/hidden_fraction": max(0.0, 1.0 - waited / total),
        }

"""Teacher with a persistent cache of its scores of given completions; usable without a live teacher."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec

from hybrid_gkd.errors import TeacherError, TeacherMismatch
from hybrid_gkd.scoring.scorer import completed_future
from hybrid_gkd.scoring.teacher_scorer import Teacher
from hybrid_gkd.teacher.client.connection import StudentNeeds
from hybrid_gkd.teacher.client.score_store import NO_SCORES, ScoredBy, ScoreStore
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import Reading, TopK

log = logging.getLogger(__name__)

KEY = "actor_rollout_ref.teacher.cache"


def stored_teacher(store: ScoreStore, needs: StudentNeeds) -> ScoredBy:
    """Return the teacher whose stored scores fit the student, for a run without a teacher service.

    This replaces the handshake with a service. Raises TeacherMismatch with the values of both sides: no teacher fits,
    or several do.
    """
    found = store.teachers()
    if not found:
        raise TeacherMismatch(f"{KEY}: {store.folder} {NO_SCORES}")
    fitting = [each for each in found if (each.topk, each.temperature) == (needs.topk, needs.temperature)]
    if not fitting:
        raise TeacherMismatch(
            f"{KEY}: {store.folder} has scores of {', '.join(map(str, found))}; the student needs K {needs.topk} "
            f"(distillation.topk), temperature {needs.temperature!r} (distillation.temperature): "
            "score with these into another folder"
        )
    if len(fitting) > 1:
        raise TeacherMismatch(
            f"{KEY}: {store.folder} has scores of several teachers: {', '.join(map(str, fitting))}; a run without a "
            "teacher needs a store with the scores of one: score into another folder (python -m hybrid_gkd.teacher "
            "score)"
        )
    # The limits of a service do not apply.
    limits = {"max_topk": needs.topk, "max_sequence_length": needs.max_sequence_length}
    needs.check(str(store.folder), msgspec.structs.replace(fitting[0].model, **limits))
    return fitting[0]


class CachedTeacher:
    """Caches a teacher's scores of given completions; implements the protocol `Teacher`.

    Readings without `Reading.keep` bypass the store.

    Args:
        store: the store of scores; the caller closes it, after the client.
        scored_by: the teacher of the stored scores.
        client: scores readings that the store does not have; None: a missing reading is an error.
    """

    def __init__(self, store: ScoreStore, scored_by: ScoredBy, *, client: Teacher | None):
        self.store, self.scored_by, self.client = store, scored_by, client
        self._counts = TeacherMetrics()
        self._is_full = False

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        """Queue readings for scoring as `TeacherClient.submit` does; stored scores are available immediately."""
        stored = [self._stored(reading) if reading.keep else None for reading in readings]
        missing = [reading for reading, future in zip(readings, stored, strict=True) if future is None]
        new = iter([self._missing(reading) for reading in missing] if self.client is None else self._score(missing))
        return [next(new) if future is None else future for future in stored]

    def _score(self, readings: list[Reading]) -> list[Future[TopK]]:
        """Send readings to the teacher; store the scores of those to keep when they arrive."""
        assert self.client is not None
        futures = self.client.submit(readings)
        for reading, future in zip(readings, futures, strict=True):
            if reading.keep:
                future.add_done_callback(functools.partial(self._keep, reading))
        return futures

    def _stored(self, reading: Reading) -> Future[TopK] | None:
        """Return the stored scores of a reading; None if there are none. A damaged entry is logged and ignored."""
        self._counts.cache_lookups += 1
        try:
            found = self.store.get(self.scored_by, reading)
        except TeacherError as error:
            log.warning("%s: ignoring damaged scores in %s: %s", reading.name, self.store.folder, error)
            return None
        if found is None:
            return None
        self._counts.cache_hits += 1
        return completed_future(found)

    def _missing(self, reading: Reading) -> Future[TopK]:
        what = "has no readable scores in" if reading.keep else (
            "is not a given completion, and there is no teacher besides"
        )
        future: Future[TopK] = Future()
        future.set_exception(TeacherError(
            f"{reading.name} {what} {self.store.folder} ({KEY}) of {self.scored_by}: score it with `python -m "
            "hybrid_gkd.teacher score`, or give the run a teacher (actor_rollout_ref.teacher.model.path or server_ip)"
        ))  # fmt: skip
        return future

    def _keep(self, reading: Reading, future: Future[TopK]) -> None:
        """Store new scores; runs in the client's thread. If the store is full, later scores are computed again."""
        if self._is_full or future.cancelled() or future.exception() is not None:
            return
        reason = ""
        try:
            if not self.store.put(self.scored_by, reading, future.result()):
                reason = f"it has {self.store.num_bytes} bytes (actor_rollout_ref.teacher.cache_gigabytes)"
        except TeacherError as error:
            reason = str(error)
        if reason:
            self._is_full = True
            log.warning("%s: stops storing scores, further ones are computed again: %s", self.store.folder, reason)

    def describe(self) -> str:
        """Return the state of the teacher's servers as `TeacherClient.describe` does."""
        return f"{self.store.folder}, without a teacher" if self.client is None else self.client.describe()

    def drain_metrics(self) -> TeacherMetrics:
        """Return counters since the last call, including cache hits."""
        counts, self._counts = self._counts, TeacherMetrics()
        return counts if self.client is None else self.client.drain_metrics() + counts

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude requests in this context from the metrics."""
        counts, self._counts = self._counts, TeacherMetrics()
        with contextlib.nullcontext() if self.client is None else self.client.uncounted():
            yield
        self._counts = counts

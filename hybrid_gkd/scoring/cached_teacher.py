"""A teacher whose scores of given answers are kept in a store, or come from one without any teacher."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from hybrid_gkd.errors import TeacherError, TeacherMismatch
from hybrid_gkd.scoring.scorer import done
from hybrid_gkd.scoring.teacher import Teacher
from hybrid_gkd.teacher.client.connection import StudentNeeds
from hybrid_gkd.teacher.client.store import ScoredBy, ScoreStore
from hybrid_gkd.teacher_client import TeacherMetrics
from hybrid_gkd.types import Reading, TopK

log = logging.getLogger(__name__)

KEY = "actor_rollout_ref.teacher.cache"


def stored_teacher(store: ScoreStore, needs: StudentNeeds) -> ScoredBy:
    """The only teacher whose scores a run can take without asking one. Raises TeacherMismatch with both sides' values.

    It is what the handshake is with a service.
    """
    found = store.teachers()
    if not found:
        raise TeacherMismatch(f"{KEY}: {store.folder} holds no scores; python -m hybrid_gkd.teacher score makes them")
    fitting = [each for each in found if (each.topk, each.temperature) == (needs.topk, needs.temperature)]
    if not fitting:
        raise TeacherMismatch(
            f"{KEY}: {store.folder} has scores of {', '.join(map(str, found))}; the student needs K {needs.topk} "
            f"(distillation.topk) at temperature {needs.temperature:g} (distillation.temperature)"
        )
    if len(fitting) > 1:
        raise TeacherMismatch(
            f"{KEY}: {store.folder} has scores of several teachers: {', '.join(map(str, fitting))}; a run without a "
            "teacher needs a store of one"
        )
    limits = {"max_topk": needs.topk, "max_sequence_length": needs.max_sequence_length}  # of a service
    needs.check(str(store.folder), msgspec.structs.replace(fitting[0].model, **limits))
    return fitting[0]


class CachedTeacher:
    """A teacher whose scores of given answers are kept: the methods of `TeacherClient` that a scorer needs.

    What a reading does not ask to keep (`Reading.keep`) goes to the client alone.

    Args:
        store: the caller closes it, after the client.
        scored_by: whose scores they are.
        client: for what the store does not have; None: that is an error.
    """

    def __init__(self, store: ScoreStore, scored_by: ScoredBy, *, client: Teacher | None):
        self.store, self.scored_by, self.client = store, scored_by, client
        self._hits = self._lookups = 0
        self._is_full = False
        if client is not None:
            store.add_teacher(scored_by)

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        """As `TeacherClient.submit`; what is in the store is there at once."""
        futures = [self._stored(reading) if reading.keep else None for reading in readings]
        if self.client is None:
            return [self._missing(reading) if future is None else future for reading, future in zip(
                readings, futures, strict=True,
            )]  # fmt: skip
        missing = [place for place, future in enumerate(futures) if future is None]
        for place, future in zip(missing, self.client.submit([readings[place] for place in missing]), strict=True):
            futures[place] = future
            if readings[place].keep:
                future.add_done_callback(functools.partial(self._keep, readings[place]))
        return [future for future in futures if future is not None]

    def _stored(self, reading: Reading) -> Future[Any] | None:
        """The scores that the store has; a damaged entry is logged and counts as none."""
        self._lookups += 1
        try:
            found = self.store.get(self.scored_by, reading)
        except TeacherError as error:
            log.warning("%s: its scores in %s are damaged, and not used: %s", reading.name, self.store.folder, error)
            return None
        if found is None:
            return None
        self._hits += 1
        return done(found)

    def _missing(self, reading: Reading) -> Future[TopK]:
        what = "has no scores in" if reading.keep else "is no given answer, and there is no teacher beside"
        future: Future[TopK] = Future()
        future.set_exception(TeacherError(
            f"{reading.name} {what} {self.store.folder} ({KEY}) of {self.scored_by}: score it with `python -m "
            "hybrid_gkd.teacher score`, or give the run a teacher (actor_rollout_ref.teacher.model.path or server_ip)"
        ))  # fmt: skip
        return future

    def _keep(self, reading: Reading, future: Future[TopK]) -> None:
        """Called in the client's thread. A store that takes no more costs time in the next epoch, not this one."""
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
            log.warning("%s: nothing more is kept, and scored again when it is needed: %s", self.store.folder, reason)

    def describe(self) -> str:
        """As `TeacherClient.describe`."""
        return f"{self.store.folder}, without a teacher" if self.client is None else self.client.describe()

    def drain_metrics(self) -> TeacherMetrics:
        """As `TeacherClient.drain_metrics`."""
        found = TeacherMetrics(complete_until=time.monotonic()) if self.client is None else self.client.drain_metrics()
        found.cache_hits, found.cache_lookups, self._hits, self._lookups = self._hits, self._lookups, 0, 0
        return found

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """As `TeacherClient.uncounted`."""
        counted = self._hits, self._lookups
        with contextlib.nullcontext() if self.client is None else self.client.uncounted():
            yield
        self._hits, self._lookups = counted

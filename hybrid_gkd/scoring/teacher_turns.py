"""Teachers that share a GPU in turn: the readings of one are sent when those of the previous one are scored."""

from __future__ import annotations

import contextvars
import functools
from concurrent.futures import Future, ThreadPoolExecutor, wait

from hybrid_gkd.errors import TeacherTimeout
from hybrid_gkd.scoring.scorer import settle
from hybrid_gkd.scoring.teacher_scorer import GRACE_SECONDS, Teacher
from hybrid_gkd.types import Reading, TopK


class Turns:
    """Order of the teachers that share a GPU: that of their calls. A thread waits for the scores of each.

    `seconds`: the longest timeout of a request.
    """

    def __init__(self, seconds: float):
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="teacher turns")
        self._timeout = seconds + GRACE_SECONDS  # by which clients complete every request
        self._active: Teacher | None = None
        self._open: list[Future[TopK]] = []
        """Futures of the active teacher that were not done at its last call."""

    def close(self) -> None:
        """End the thread; readings that were not sent are dropped."""
        self.thread.shutdown(wait=False, cancel_futures=True)

    def send(self, teacher: Teacher, readings: list[Reading], found: list[Future[TopK]]) -> None:
        """Wait for the previous teacher, then send readings; `found` gets their scores. Runs in the thread."""
        try:
            if teacher is not self._active:
                if wait(self._open, self._timeout).not_done:
                    assert self._active is not None
                    raise TeacherTimeout(f"the teacher before it has not answered: {self._active.describe()}")
                self._active, self._open = teacher, []
            futures = teacher.submit(readings)
        except Exception as error:  # the trainer waits for it
            for own in found:
                own.set_exception(error)
            return
        self._open = [each for each in self._open if not each.done()] + futures
        for own, future in zip(found, futures, strict=True):
            _forward(future, own)


class TeacherInTurn:
    """Teacher that shares a GPU with others in turn; implements the protocol `Teacher`."""

    def __init__(self, teacher: Teacher, turns: Turns):
        self.teacher, self.turns = teacher, turns
        self.describe, self.uncounted, self.drain_metrics = teacher.describe, teacher.uncounted, teacher.drain_metrics

    def submit(self, readings: list[Reading]) -> list[Future[TopK]]:
        """Queue readings for the teacher's next turn; return one future per reading, in order."""
        found: list[Future[TopK]] = [Future() for _ in readings]
        if readings:
            call = functools.partial(self.turns.send, self.teacher, readings, found)
            self.turns.thread.submit(contextvars.copy_context().run, call)  # requests have the caller's step
        return found


def _forward(source: Future[TopK], target: Future[TopK]) -> None:
    """Give a future the result or the error of another one."""
    source.add_done_callback(lambda done: settle(target, done.result))

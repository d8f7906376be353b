"""Spans, named stretches of time in a process: the trainer's make `timing/*` and `teacher/hidden_fraction`.

Each process appends its spans to a file of its own, and reporting/trace.py makes one trace of the files.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_gkd.runtime.files import JsonLinesFile

logger = logging.getLogger(__name__)

Interval = tuple[float, float]
TRAINER = "trainer"
SUFFIX = ".spans.jsonl"
MAX_BYTES = 16 * 2**20  # about 250,000 spans
current_step: contextvars.ContextVar[int | None] = contextvars.ContextVar("current_step", default=None)
"""Training step that this thread works for; None: none."""


@contextlib.contextmanager
def working_for(step: int) -> Iterator[None]:
    """What the block does in this thread is for a step."""
    token = current_step.set(step)
    try:
        yield
    finally:
        current_step.reset(token)


class Span(NamedTuple):
    """A stretch of time that a participant spent on one thing."""

    row: str
    """TRAINER, "teacher", or a worker by role and rank: "rollout worker 0"."""
    name: str
    start: float
    end: float
    """Seconds of this process's time.monotonic; in a file, of the wall clock."""
    lane: int = 0
    """Spans of a row that overlap without containing each other are in different lanes."""
    step: int | None = None
    """Training step that it was for."""


class Counters(NamedTuple):
    """Numbers of a participant at a moment, which its row shows as curves."""

    row: str
    at: float
    """As a span's start."""
    values: dict[str, float]


class SpanFile:
    """Appends spans to a file, which the first one creates, as lines of JSON.

    Times become those of the wall clock by one reading of it, so that they never run backwards. A failing disk costs
    the spans, with one warning, and not the run. At `max_bytes` the file becomes `<name>.old.spans.jsonl`, in place
    of the one before: the newest spans are always there, in twice as much at most.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES):
        self._path, self._max_bytes = path, max_bytes
        self._wall_minus_monotonic = time.time() - time.monotonic()
        self._file: JsonLinesFile | None = None
        self._failed = False

    def __call__(self, event: Span | Counters) -> None:
        if self._failed:
            return
        times = {"start", "end", "at"}.intersection(event._fields)
        on_wall = {name: round(getattr(event, name) + self._wall_minus_monotonic, 6) for name in times}
        try:
            self._file = self._file or JsonLinesFile(self._path)
            self._file.append([event._replace(**on_wall)])
            if self._file.size() > self._max_bytes:
                self.close()
                self._path.replace(self._path.with_name(self._path.name.removesuffix(SUFFIX) + ".old" + SUFFIX))
        except OSError as error:
            self._failed = True
            logger.warning("%s cannot be written, the run goes on without it: %s", self._path, error)

    def close(self) -> None:
        """Close the file; a later span opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Clock:
    """Times blocks of code; threads may share it.

    Args:
        sink: gets every span and counter, one at a time, teacher requests included.
        step: of the spans.
        sample: gives numbers at the end of each span.
    """

    def __init__(
        self, row: str = TRAINER, sink: Callable[[Span | Counters], None] = lambda event: None,
        step: Callable[[], int | None] = current_step.get, sample: Callable[[], dict[str, float]] = dict,
    ) -> None:  # fmt: skip
        self._row, self._sink, self._step, self._sample = row, sink, step, sample
        self._lock = threading.Lock()
        self._lanes: dict[int, int] = {}  # of each thread
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []  # of the trainer: those that `overlap` will need
        self._requests: list[Interval] = []
        self._request_lanes: list[float] = []  # when the last request in each ended
        self._requests_until = math.inf
        self._of_thread = threading.local()  # open spans, seconds in outermost ones, and both at the last `untimed`

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block; also when it raises."""
        own = vars(self._of_thread)
        depth, started = own.get("depth", 0), time.monotonic()
        own["depth"] = depth + 1
        try:
            yield
        finally:
            ended = time.monotonic()
            own["depth"] = depth
            if depth == 0:
                own["timed"] = own.get("timed", 0.0) + ended - started
            self.add(name, ended - started)
            with self._lock:
                lane = self._lanes.setdefault(threading.get_ident(), len(self._lanes))
                span = Span(self._row, name, started, ended, lane, self._step())
                self._sink(span)
                if self._row == TRAINER:
                    self._spans.append(span)
        self.count(self._sample())  # not after an error, which a device that has failed would hide by one of its own

    def count(self, values: dict[str, float]) -> None:
        """Record numbers as they are now, by the name and unit of their curve: "GPU memory, GiB"."""
        if values:
            with self._lock:
                self._sink(Counters(self._row, time.monotonic(), values))

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """`timing/<name>` -> seconds since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {f"timing/{name}": seconds for name, seconds in taken.items()}

    def untimed(self) -> dict[str, float]:
        """`timing/other`: seconds since this thread's last call in which it had no span; nothing in its first call."""
        own, now = vars(self._of_thread), time.monotonic()
        timed = own.get("timed", 0.0)
        last, own["last"] = own.get("last"), (now, timed)
        return {} if last is None else {"timing/other": now - last[0] - (timed - last[1])}

    def requests(
        self, intervals: list[Interval], *, until: float, steps: Iterable[int | None] = itertools.repeat(None)
    ) -> float:
        """Record the teacher requests that have ended, each from its first sending to its scores, and their steps.

        Every request that began before `until` is among these or earlier ones. Returns the seconds in which at least
        one was under way, `timing/get_teacher_knowledge`, without those that an earlier call has counted.
        """
        for (start, end), step in sorted(zip(intervals, steps, strict=False), key=lambda pair: pair[0]):
            lane = next((n for n, free in enumerate(self._request_lanes) if free <= start), len(self._request_lanes))
            self._request_lanes[lane : lane + 1] = [end]
            with self._lock:
                self._sink(Span("teacher", "request", start, end, lane, step))
        in_flight = seconds(intervals, without=self._requests)
        self._requests += intervals
        self._requests_until = until
        self.add("get_teacher_knowledge", in_flight)
        return in_flight

    def overlap(self) -> dict[str, float]:
        """`teacher/hidden_fraction` of the time since the last call; nothing where no request was under way.

        No span may be open. From the first request that is still under way on, time counts in the next call.
        """
        horizon = self._requests_until
        requests = [(start, min(end, horizon)) for start, end in self._requests if start < horizon]
        self._requests = [(max(start, horizon), end) for start, end in self._requests if end > horizon]
        with self._lock:
            spans, self._spans = self._spans, [span for span in self._spans if span.end > horizon]
        in_flight = seconds(requests)
        return {"teacher/hidden_fraction": hidden_seconds(requests, spans) / in_flight} if in_flight else {}


def spanned(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method whose calls are spans of `self.clock`."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.clock.span(name):
                return method(self, *args, **kwargs)

        return call

    return decorate


def hidden_seconds(requests: Iterable[Interval], spans: Iterable[Span]) -> float:
    """Time with a request under way in which the trainer was generating or updating, and not waiting for the teacher.

    A rollout engine in a pool of its own generates during that wait, and the update stands still all the same.
    """
    own = [(span.name, (span.start, span.end)) for span in spans if span.row == TRAINER]
    work = [interval for name, interval in own if name in ("gen", "update_actor")]
    return seconds(requests, work, without=[interval for name, interval in own if name == "wait_prev_teacher"])


def seconds(*sets: Iterable[Interval], without: Iterable[Interval] = ()) -> float:
    """Time that is in an interval of every set, and in none of `without`."""
    every = [*sets, without]
    edges = sorted(
        (at, change, n) for n, intervals in enumerate(every) for start, end in intervals
        for at, change in ((start, 1), (end, -1))
    )
    under_way, total, last = [0] * len(every), 0.0, 0.0
    for at, change, n in edges:
        if all(under_way[:-1]) and not under_way[-1]:
            total += at - last
        under_way[n] += change
        last = at
    return total

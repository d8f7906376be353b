"""Named time spans of a process; those of the trainer give `timing/*` and `teacher/hidden_fraction`.

Each process appends its spans to its own file; reporting/trace.py merges the files into one trace.
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
"""Training step that this thread works for; None without one."""


@contextlib.contextmanager
def working_for(step: int) -> Iterator[None]:
    """Attribute the work of this thread in the block to a training step."""
    token = current_step.set(step)
    try:
        yield
    finally:
        current_step.reset(token)


class Span(NamedTuple):
    """A named interval of one participant."""

    row: str
    """TRAINER, "teacher", or a worker by role and rank: "rollout worker 0"."""
    name: str
    start: float
    end: float
    """Seconds of this process's time.monotonic; wall-clock time in a file."""
    lane: int = 0
    """Number of the lane; overlapping spans of a row that are not nested have different lanes."""
    step: int | None = None
    """Training step of the span."""


class Counters(NamedTuple):
    """Values of a participant at one moment, drawn as curves in its row."""

    row: str
    at: float
    """Time of the values, in the clock of `Span.start`."""
    values: dict[str, float]


class SpanFile:
    """Appends spans as JSON lines to a file, which is created by the first one.

    Times are converted to wall-clock time with one offset, so that they are monotonic. If the disk fails, spans are
    dropped after one warning and the run continues. At `max_bytes` the file is renamed to `<name>.old.spans.jsonl`,
    which replaces the previous one: the newest spans are always kept, in at most twice that size.
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
            logger.warning("%s cannot be written, the run continues without it: %s", self._path, error)

    def close(self) -> None:
        """Close the file; a later span reopens it."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Clock:
    """Measures the time of code blocks; thread-safe.

    Args:
        sink: receives every span and counter, teacher requests included; never called concurrently.
        step: returns the training step of a span.
        sample: returns counter values at the end of each span.
    """

    def __init__(
        self, row: str = TRAINER, sink: Callable[[Span | Counters], None] = lambda event: None,
        step: Callable[[], int | None] = current_step.get, sample: Callable[[], dict[str, float]] = dict,
    ) -> None:  # fmt: skip
        self._row, self._sink, self._step, self._sample = row, sink, step, sample
        self._lock = threading.Lock()
        self._lanes: dict[int, int] = {}  # by thread id
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []  # spans of the trainer that `overlap` still needs
        self._requests: list[Interval] = []
        self._request_lanes: list[float] = []  # end of the last request in each lane
        self._requests_until = math.inf
        self._of_thread = threading.local()  # open spans, seconds in outermost spans, and both at the last `untimed`

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure the time of the block, also if it raises."""
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
        self.count(self._sample())  # not after an error, which sampling a failed device could replace by another one

    def count(self, values: dict[str, float]) -> None:
        """Record values by the name and unit of their curve, such as "GPU memory, GiB"."""
        if values:
            with self._lock:
                self._sink(Counters(self._row, time.monotonic(), values))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return `timing/<name>` -> seconds since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {f"timing/{name}": seconds for name, seconds in taken.items()}

    def untimed(self) -> dict[str, float]:
        """Return `timing/other`: seconds outside of spans since this thread's last call; empty in its first call."""
        own, now = vars(self._of_thread), time.monotonic()
        timed = own.get("timed", 0.0)
        last, own["last"] = own.get("last"), (now, timed)
        return {} if last is None else {"timing/other": now - last[0] - (timed - last[1])}

    def requests(
        self, intervals: list[Interval], *, until: float, steps: Iterable[int | None] = itertools.repeat(None)
    ) -> float:
        """Record finished teacher requests, each from its first attempt to its scores, with their steps.

        All requests that began before `until` must be among these or earlier ones. Returns the seconds during which at
        least one request was in flight (`timing/get_teacher_knowledge`), without those counted by earlier calls.
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
        """Return `teacher/hidden_fraction` of the time since the last call; empty if no request was in flight.

        No span may be open. Time after the start of the oldest unfinished request counts in the next call.
        """
        horizon = self._requests_until
        requests = [(start, min(end, horizon)) for start, end in self._requests if start < horizon]
        self._requests = [(max(start, horizon), end) for start, end in self._requests if end > horizon]
        with self._lock:
            spans, self._spans = self._spans, [span for span in self._spans if span.end > horizon]
        in_flight = seconds(requests)
        return {"teacher/hidden_fraction": hidden_seconds(requests, spans) / in_flight} if in_flight else {}


def spanned(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that records every call of a method as a span of `self.clock`."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.clock.span(name):
                return method(self, *args, **kwargs)

        return call

    return decorate


def hidden_seconds(requests: Iterable[Interval], spans: Iterable[Span]) -> float:
    """Return the seconds with a request in flight in which the trainer generated or updated and did not wait for it.

    A rollout engine in its own pool generates during that wait, but the update is idle; this does not count as hidden.
    """
    own = [(span.name, (span.start, span.end)) for span in spans if span.row == TRAINER]
    work = [interval for name, interval in own if name in ("gen", "update_actor")]
    return seconds(requests, work, without=[interval for name, interval in own if name == "wait_prev_teacher"])


def seconds(*sets: Iterable[Interval], without: Iterable[Interval] = ()) -> float:
    """Return the length of the intersection of all sets of intervals, minus the intervals of `without`."""
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

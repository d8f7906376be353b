"""Time by named span: what `timing/*`, `teacher/hidden_fraction` and trace.json are made of.

All times are seconds of this process's time.monotonic. Workers keep a clock of their own, and the worker group
brings their spans here with the difference of the hosts' clocks taken off.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hybrid_gkd.reporting.trace import TraceFile

Interval = tuple[float, float]
"""Start and end."""
BUSY = ("gen", "update_actor")
"""Spans in which a worker does what the teacher's time is to hide behind."""
TEACHER_WAIT = "wait_prev_teacher"
"""Span in which the trainer has nothing to do but wait for the teacher: nothing hides that."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one participant did from `start` to `end`."""

    row: str
    """"trainer", "teacher", or a worker by role and rank, e.g. "rollout worker 0"."""
    name: str
    start: float
    end: float
    lane: int = 0
    """Spans of a row that overlap without containing each other are in different lanes."""


@dataclass(frozen=True, slots=True)
class Spans:
    """What a worker hands over: everything that ended before `until`, and nothing is open."""

    spans: list[Span]
    until: float


class Clock:
    """Records spans. Threads may share it.

    Args:
        row: whose spans `span` records.
        trace: takes every span; None writes none.
    """

    def __init__(self, row: str = "trainer", trace: TraceFile | None = None) -> None:
        self.row = row
        self.trace = trace
        self.sources: list[Callable[[], Spans]] = []
        """Called once per step for the spans of the workers."""
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
        self._spans: list[Span] = []
        self._threads: dict[int, int] = {}
        self._requests: list[Interval] = []
        self._request_lanes: list[float] = []
        self._requests_until = -math.inf
        self._reported_until = -math.inf

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block; also when it raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            self.add(name, ended - started)
            with self._lock:
                lane = self._threads.setdefault(threading.get_ident(), len(self._threads))
            self._record([Span(self.row, name, started, ended, lane)])

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """`timing/<name>` -> seconds since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {f"timing/{name}": seconds for name, seconds in taken.items()}

    def take_spans(self) -> Spans:
        """What was recorded since the last call, for the clock of another process."""
        with self._lock:
            taken, self._spans = self._spans, []
        return Spans(taken, time.monotonic())

    def requests(self, intervals: list[Interval], *, until: float) -> float:
        """Record the teacher requests that have ended.

        Args:
            intervals: from the first sending to the scores of each.
            until: every request that began before is among these or earlier ones.

        Returns:
            Seconds in which at least one was under way, which is `timing/get_teacher_knowledge`; without those that an
            earlier call has counted.
        """
        spans = []
        for start, end in sorted(intervals):
            lane = next((n for n, free in enumerate(self._request_lanes) if free <= start), len(self._request_lanes))
            self._request_lanes[lane : lane + 1] = [end]
            spans.append(Span("teacher", "request", start, end, lane))
        in_flight = seconds(intersect(intervals, gaps(self._requests)))
        self._requests += intervals
        self._requests_until = until
        if self.trace is not None:
            self.trace.write(spans)
        self.add("get_teacher_knowledge", in_flight)
        return in_flight

    def overlap(self) -> dict[str, float]:
        """`teacher/hidden_fraction` of the time since the last call; nothing where no request was under way.

        The time ends where the spans of a worker or the requests are not complete yet; what is later counts next time.
        """
        found = [source() for source in self.sources]
        self._record([span for part in found for span in part.spans])
        if self._requests_until == -math.inf:  # no teacher
            self._spans = []
        horizon = min([self._requests_until, *(part.until for part in found)])
        if horizon <= self._reported_until:
            return {}
        window = [(self._reported_until, horizon)]
        requests = intersect(self._requests, window)
        with self._lock:
            spans = list(self._spans)
            self._spans = [span for span in spans if span.end > horizon]
        self._requests = [interval for interval in self._requests if interval[1] > horizon]
        self._reported_until = horizon
        in_flight = seconds(requests)
        return {"teacher/hidden_fraction": seconds(intersect(requests, busy(spans))) / in_flight} if in_flight else {}

    def collect(self, part: Spans) -> None:
        """Take over what another clock has recorded."""
        self._record(part.spans)

    def _record(self, spans: list[Span]) -> None:
        with self._lock:
            # The trainer's own are in timing/*.
            self._spans += [span for span in spans if span.row != "trainer" or span.name == TEACHER_WAIT]
        if self.trace is not None:
            self.trace.write(spans)

    def close(self) -> None:
        """Finish the trace."""
        if self.trace is not None:
            self.trace.close()


def spanned(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method whose calls are spans of `self.clock`."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.clock.span(name):
                return method(self, *args, **kwargs)

        return call

    return decorate


def busy(spans: Iterable[Span]) -> list[Interval]:
    """When at least one worker was generating or updating and not waiting within it (spans `wait_*`).

    Without what the trainer waited for the teacher: a rollout engine in a pool of its own generates meanwhile, and the
    update stands still all the same.
    """
    rows: dict[str, tuple[list[Interval], list[Interval]]] = {}
    standstill: list[Interval] = []
    for span in spans:
        if span.row == "trainer":
            standstill += [(span.start, span.end)] if span.name == TEACHER_WAIT else []
        elif span.row != "teacher":
            work, waits = rows.setdefault(span.row, ([], []))
            if span.name in BUSY:
                work.append((span.start, span.end))
            elif span.name.startswith("wait_"):
                waits.append((span.start, span.end))
    at_work = merge(part for work, waits in rows.values() for part in intersect(work, gaps(waits)))
    return intersect(at_work, gaps(standstill))


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """Everything that is in none of them."""
    edges = [-math.inf, *(edge for interval in merge(intervals) for edge in interval), math.inf]
    return list(zip(edges[::2], edges[1::2], strict=True))


def intersect(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """What is in one of the first and in one of the second, as disjoint intervals in order."""
    others, found, index = merge(second), list[Interval](), 0
    for start, end in merge(first):
        while index < len(others) and others[index][1] <= start:
            index += 1
        for low, high in others[index:]:
            if low >= end:
                break
            found.append((max(start, low), min(end, high)))
    return found


def seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(end - start for start, end in merge(intervals))

"""Requests from their first sending to their outcome, the readings that wait for one, and counters."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.runtime.spans import current_step
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.teacher.client.connection import Connection
from hybrid_gkd.types import Reading, TopK

GROUP_WAIT_SECONDS = 0.005
"""A request that is not full leaves when its first reading has waited this long."""
TOKENS_PER_REQUEST = 16384
"""A request takes no further reading beyond this many tokens; two or more fill one call of the engine."""
Pair = tuple[Reading, Future[TopK], int | None]
"""A reading, its scores to come, and the training step that it is for."""


@dataclass(kw_only=True)
class TeacherMetrics:
    """Counters since the last `drain_metrics`."""

    requests: list[tuple[float, float]] = field(default_factory=list)
    """time.monotonic of the first sending of a request and of its scores, one entry per request."""
    steps: list[int | None] = field(default_factory=list)
    """Training step of each of them."""
    complete_until: float = 0.0
    """Every request that began before this is among these or earlier ones."""
    tokens: int = 0
    """Of the readings that were scored."""
    scored_tokens: int = 0
    """Those of them that scores were asked for."""
    retries: int = 0
    bad_replies: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    queue_lengths: list[int] = field(default_factory=list)
    """Requests that waited for a worker, one entry per second and server."""
    engine_busy: list[float] = field(default_factory=list)
    """Share of the time in which the engines had work, likewise."""
    cache_lookups: int = 0
    """Readings that were looked up in a store; `cache_hits` of them were there."""
    cache_hits: int = 0

    @property
    def latencies(self) -> list[float]:
        return [end - start for start, end in self.requests]


class Waiting:
    """Readings that are not in flight yet, oldest first."""

    def __init__(self, group_size: int):
        self._group_size = group_size
        self._line: deque[tuple[float, Pair]] = deque()
        self.num_tokens = 0

    def add(self, reading: Reading, future: Future[TopK]) -> None:
        self._line.append((time.monotonic(), (reading, future, current_step.get())))
        self.num_tokens += reading.num_tokens

    def take_group(self, now: float) -> tuple[list[Pair], float]:
        """The readings of one request, once it is full or the first of them has waited long enough.

        Else none, and the seconds until then.
        """
        if not self._line:
            return [], math.inf
        size = num_tokens = 0
        for _, (reading, *_) in itertools.islice(self._line, self._group_size):
            num_tokens += reading.num_tokens
            if size > 0 and num_tokens > TOKENS_PER_REQUEST:
                break
            size += 1
        wait = self._line[0][0] + GROUP_WAIT_SECONDS - now
        if size < self._group_size and num_tokens < TOKENS_PER_REQUEST and wait > 0:
            return [], wait
        return self.take(size), 0.0

    def take(self, count: int | None = None) -> list[Pair]:
        taken = [self._line.popleft()[1] for _ in range(len(self._line) if count is None else count)]
        self.num_tokens -= sum(reading.num_tokens for reading, *_ in taken)
        return taken


@dataclass(eq=False, kw_only=True)
class Request:
    """Readings that travel together, from their first sending to their scores or their error."""

    id: str
    readings: tuple[Reading, ...]
    futures: tuple[Future[TopK], ...]
    started: float
    deadline: float
    step: int | None = None
    """Training step of its first reading."""
    attempt: int = 0
    attempt_deadline: float = 0.0
    connection: Connection | None = None
    """Of the current attempt; None: to be sent, not before `send_at`."""
    last_connection: Connection | None = None
    sent_at_ping: int = 0
    send_at: float = 0.0
    num_failures: int = 0
    problem: str = ""
    """Why the last attempt failed."""

    @property
    def num_tokens(self) -> int:
        """Sum of L."""
        return sum(reading.num_tokens for reading in self.readings)

    @property
    def num_scored(self) -> list[int]:
        """R of each reading."""
        return [len(reading.positions) for reading in self.readings]

    def describe(self, connections: list[Connection]) -> str:
        """Where the request is, what it waits for, and how long: the start of every error about it."""
        where = ", ".join(each.address for each in ([self.last_connection] if self.last_connection else connections))
        return (
            f"{where}: request {self.id} ({len(self.readings)} sequences, {self.num_tokens} tokens): "
            f"waited {time.monotonic() - self.started:.1f} s for its scores, sent {self.attempt} time(s)"
        )

    def why_late(self, limit: Timeout, servers: str) -> str:
        """Why there was no answer before the deadline; `servers` says what is known of them now."""
        return f"the limit is {limit}; {servers}" + (f"; the last attempt: {self.problem}" if self.problem else "")


def as_sent(reading: Reading) -> Reading:
    """Return it with arrays, also where token ids and positions are lists of integers, and with some name.

    Raises TeacherError for anything but integers, and for positions that are not ascending in [1, L).
    """
    name, token_ids, positions = reading.name or "a reading", *map(np.asarray, (reading.token_ids, reading.positions))
    for what, array in (("token_ids", token_ids), ("positions", positions)):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            found = f"{array.dtype} of shape {array.shape}"
            raise TeacherError(f"{name}: {what} are a list or array of integers, got {found}")
    positions = positions.astype(np.int64)  # the differences of unsigned ones are never negative
    if not positions.size or (np.diff(positions, prepend=0, append=len(token_ids)) < 1).any():
        rule = f"positions are ascending, from 1 to below its {len(token_ids)} tokens, and at least one"
        raise TeacherError(f"{name}: {rule}; got {positions.tolist()[:9]}")
    return replace(reading, token_ids=token_ids, positions=positions, name=name)

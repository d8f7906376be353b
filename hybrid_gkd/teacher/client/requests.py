"""Client-side requests, the queue of readings, and counters."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace

import numpy as np

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.runtime.spans import current_step
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.teacher.client.connection import Connection
from hybrid_gkd.teacher.protocol import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, reply_bytes
from hybrid_gkd.types import Reading, TopK

GROUP_WAIT_SECONDS = 0.005
"""Longest time that a reading waits for a request to fill up."""
TOKENS_PER_REQUEST = 16384
"""Largest number of tokens of a request with several readings; two or more such requests fill one engine call."""
PendingReading = tuple[Reading, Future[TopK], int | None]
"""A reading, the future of its scores, and its training step."""


@dataclass(kw_only=True)
class TeacherMetrics:
    """Counters of the time since the last `drain_metrics`."""

    requests: list[tuple[float, float]] = field(default_factory=list)
    """Times (time.monotonic) of the first send and of the scores of each request."""
    steps: list[int | None] = field(default_factory=list)
    """Training step of each request."""
    complete_until: float = math.inf
    """Time before which all started requests are included in these counters or earlier ones."""
    tokens: int = 0
    """Number of tokens of the scored readings."""
    scored_tokens: int = 0
    """Number of scored positions."""
    retries: int = 0
    bad_replies: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    queue_lengths: list[int] = field(default_factory=list)
    """Number of requests waiting for a worker, one entry per second and server."""
    engine_busy: list[float] = field(default_factory=list)
    """Fraction of the time in which the engines had work, one entry per second and server."""
    cache_lookups: int = 0
    """Number of readings looked up in a store of scores; `cache_hits` of them were found."""
    cache_hits: int = 0
    aligned_tokens: int = 0
    """Number of trained tokens of samples for teachers with another tokenizer; of these `matched_tokens` are one token
    of the teacher, `span_tokens` are scored in spans."""
    matched_tokens: int = 0
    span_tokens: int = 0

    def __add__(self, other: TeacherMetrics) -> TeacherMetrics:
        """Return the counters of two clients of the same time as those of one."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return TeacherMetrics(**sums | {"complete_until": min(self.complete_until, other.complete_until)})

    @property
    def latencies(self) -> list[float]:
        return [end - start for start, end in self.requests]


class ReadingQueue:
    """Queue of the readings that are not in flight yet. `topk`: largest number of candidates per position."""

    def __init__(self, group_size: int, topk: int):
        self._group_size, self._topk = group_size, topk
        self._queue: deque[tuple[float, PendingReading]] = deque()
        self.num_tokens = 0

    def add(self, reading: Reading, future: Future[TopK]) -> None:
        self._queue.append((time.monotonic(), (reading, future, current_step.get())))
        self.num_tokens += reading.num_tokens

    def take_group(self, now: float) -> tuple[list[PendingReading], float]:
        """Return the readings of one request if it is full or its first reading has waited long enough.

        Otherwise return none, and the seconds until then.
        """
        if not self._queue:
            return [], math.inf
        size = num_tokens = num_bytes = num_reply_bytes = 0
        is_full, width = False, _num_given(self._queue[0][1][0])
        for _, (reading, *_) in itertools.islice(self._queue, self._group_size):
            num_tokens, num_bytes = num_tokens + reading.num_tokens, num_bytes + reading.num_bytes
            num_reply_bytes += reply_bytes(len(reading.positions), self._topk)
            is_full = num_tokens > TOKENS_PER_REQUEST or num_bytes > MAX_REQUEST_BYTES
            is_full |= num_reply_bytes > MAX_REPLY_BYTES or _num_given(reading) != width
            if size > 0 and is_full:
                break
            size += 1
        wait = self._queue[0][0] + GROUP_WAIT_SECONDS - now
        if size < self._group_size and num_tokens < TOKENS_PER_REQUEST and not is_full and wait > 0:
            return [], wait
        return self.take(size), 0.0

    def take(self, count: int | None = None) -> list[PendingReading]:
        taken = [self._queue.popleft()[1] for _ in range(len(self._queue) if count is None else count)]
        self.num_tokens -= sum(reading.num_tokens for reading, *_ in taken)
        return taken


@dataclass(eq=False, kw_only=True)
class Request:
    """Readings that are sent together."""

    id: str
    readings: tuple[Reading, ...]
    futures: tuple[Future[TopK], ...]
    started: float
    deadline: float
    step: int | None = None
    """Training step of the first reading."""
    attempt: int = 0
    attempt_deadline: float = 0.0
    connection: Connection | None = None
    """Connection of the current attempt; None: to be sent at `send_at` or later."""
    last_connection: Connection | None = None
    sent_at_ping: int = 0
    send_at: float = 0.0
    num_failures: int = 0
    problem: str = ""
    """Reason of the last attempt's failure."""

    @property
    def num_tokens(self) -> int:
        """Sum of L over the readings."""
        return sum(reading.num_tokens for reading in self.readings)

    @property
    def num_scored(self) -> list[int]:
        """Number R of scored positions of each reading."""
        return [len(reading.positions) for reading in self.readings]

    def describe(self, connections: list[Connection]) -> str:
        """Return server, size, waiting time and attempts of the request: the start of every error about it."""
        where = ", ".join(each.address for each in ([self.last_connection] if self.last_connection else connections))
        return (
            f"{where}: request {self.id} ({len(self.readings)} sequences, {self.num_tokens} tokens): "
            f"waited {time.monotonic() - self.started:.1f} s for its scores, sent {self.attempt} time(s)"
        )

    def describe_timeout(self, limit: Timeout, servers: str) -> str:
        """Return the reason of a missed deadline; `servers`: the present state of the servers."""
        return f"the limit is {limit}; {servers}" + (f"; the last attempt: {self.problem}" if self.problem else "")


def _num_given(reading: Reading) -> int | None:
    """Return the number C of given ids per row; None without."""
    return None if reading.given_ids is None else reading.given_ids.shape[1]


def normalize_reading(reading: Reading) -> Reading:
    """Convert token ids, positions and given ids, arrays or lists of integers, to arrays, and set a missing name.

    Raises TeacherError: values are not integers, positions are not ascending in [1, L), or given ids not [R, C].
    """
    name, token_ids, positions = reading.name or "a reading", *map(np.asarray, (reading.token_ids, reading.positions))
    for what, array in (("token_ids", token_ids), ("positions", positions)):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            found = f"{array.dtype} of shape {array.shape}"
            raise TeacherError(f"{name}: {what} must be a list or array of integers, got {found}")
    positions = positions.astype(np.int64)  # differences of unsigned integers are never negative
    if not positions.size or (np.diff(positions, prepend=0, append=len(token_ids)) < 1).any():
        rule = f"positions must be ascending in [1, {len(token_ids)}) and not empty"
        raise TeacherError(f"{name}: {rule}; got {positions.tolist()[:9]}")
    given = None if reading.given_ids is None else np.asarray(reading.given_ids)
    if given is not None and (given.ndim != 2 or len(given) != len(positions) or given.dtype.kind not in "iu"):
        rule = f"given_ids must be integers of shape [{len(positions)}, C]"
        raise TeacherError(f"{name}: {rule}, got {given.dtype} of shape {given.shape}")
    return replace(reading, token_ids=token_ids, positions=positions, name=name, given_ids=given)

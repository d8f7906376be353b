"""Requests from their first sending to their outcome, the sequences that wait for one, and counters."""

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
from hybrid_gkd.types import Sequence, TeacherTopK

GROUP_WAIT_SECONDS = 0.005
"""A request that is not full leaves when its first sequence has waited this long."""
TOKENS_PER_REQUEST = 16384
"""A request takes no further sequence beyond this many tokens; two or more fill one call of the engine."""
Pair = tuple[Sequence, Future[TeacherTopK], int | None]
"""A sequence, its scores to come, and the training step that it is for."""


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
    """Prompt and response tokens scored."""
    response_tokens: int = 0
    retries: int = 0
    bad_replies: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    queue_lengths: list[int] = field(default_factory=list)
    """Requests that waited for a worker, one entry per second and server."""
    engine_busy: list[float] = field(default_factory=list)
    """Share of the time in which the engines had work, likewise."""

    @property
    def latencies(self) -> list[float]:
        return [end - start for start, end in self.requests]


class Waiting:
    """Sequences that are not in flight yet, oldest first."""

    def __init__(self, group_size: int):
        self._group_size = group_size
        self._line: deque[tuple[float, Pair]] = deque()
        self.num_tokens = 0

    def add(self, sequence: Sequence, future: Future[TeacherTopK]) -> None:
        self._line.append((time.monotonic(), (sequence, future, current_step.get())))
        self.num_tokens += sequence.num_tokens

    def take_group(self, now: float) -> tuple[list[Pair], float]:
        """The sequences of one request, once it is full or the first of them has waited long enough.

        Else none, and the seconds until then.
        """
        if not self._line:
            return [], math.inf
        size = num_tokens = 0
        for _, (sequence, *_) in itertools.islice(self._line, self._group_size):
            num_tokens += sequence.num_tokens
            if size > 0 and num_tokens > TOKENS_PER_REQUEST:
                break
            size += 1
        wait = self._line[0][0] + GROUP_WAIT_SECONDS - now
        if size < self._group_size and num_tokens < TOKENS_PER_REQUEST and wait > 0:
            return [], wait
        return self.take(size), 0.0

    def take(self, count: int | None = None) -> list[Pair]:
        taken = [self._line.popleft()[1] for _ in range(len(self._line) if count is None else count)]
        self.num_tokens -= sum(sequence.num_tokens for sequence, *_ in taken)
        return taken


@dataclass(eq=False, kw_only=True)
class Request:
    """Sequences that travel together, from their first sending to their scores or their error."""

    id: str
    sequences: tuple[Sequence, ...]
    futures: tuple[Future[TeacherTopK], ...]
    started: float
    deadline: float
    step: int | None = None
    """Training step of its first sequence."""
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
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def response_lengths(self) -> list[int]:
        return [len(sequence.response_ids) for sequence in self.sequences]

    def describe(self, connections: list[Connection]) -> str:
        """Where the request is, what it waits for, and how long: the start of every error about it."""
        where = ", ".join(each.address for each in ([self.last_connection] if self.last_connection else connections))
        return (
            f"{where}: request {self.id} ({len(self.sequences)} sequences, {self.num_tokens} tokens): "
            f"waited {time.monotonic() - self.started:.1f} s for its scores, sent {self.attempt} time(s)"
        )

    def why_late(self, limit: Timeout, servers: str) -> str:
        """Why there was no answer before the deadline; `servers` says what is known of them now."""
        return f"the limit is {limit}; {servers}" + (f"; the last attempt: {self.problem}" if self.problem else "")


def as_sent(sequence: Sequence) -> Sequence:
    """With the prompt that the teacher sees, and arrays where token ids may have been lists.

    Raises TeacherError for anything but integers.
    """
    seen = sequence.prompt_ids if sequence.teacher_prompt_ids is None else sequence.teacher_prompt_ids
    prompt_ids, response_ids = np.asarray(seen), np.asarray(sequence.response_ids)
    for name, array in (("prompt_ids", prompt_ids), ("response_ids", response_ids)):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            what = f"{array.dtype} of shape {array.shape}"
            raise TeacherError(f"sequence {sequence.index}: {name} are a list or array of integers, got {what}")
    return replace(sequence, prompt_ids=prompt_ids, response_ids=response_ids)

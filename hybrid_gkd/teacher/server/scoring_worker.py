"""A scoring worker: one process with one engine, connected to one broker.

The engine runs in the main thread. A background thread owns the socket, so that pings are answered during computation.
The threads communicate through a queue (work) and an inproc socket (replies).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import zmq

from hybrid_gkd.errors import TeacherError, TeacherRefused
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.keys import Keys
from hybrid_gkd.teacher.limits import check_request
from hybrid_gkd.teacher.network import Dealer
from hybrid_gkd.teacher.protocol import AnyMessage, Buffer, Reply, ScoreError, ScoreRequest, ScoreResult
from hybrid_gkd.types import Reading, TopK

if TYPE_CHECKING:  # the engines need torch, the link does not
    from hybrid_gkd.teacher.engines.base import ScoringEngine
    from hybrid_gkd.teacher.server.turns import GpuTurns

log = logging.getLogger(__name__)

CREDITS = 16
"""Requests held at a time: enough to keep the engine busy while the next ones arrive."""
PREFETCH_TOKENS = 32768
"""Tokens queued in the engine below which it gets more work: a few of its steps."""
BUSY_SECONDS = 10.0
"""Window of the reported utilization."""
HUNG_SECONDS, HUNG_EXIT_CODE = 60.0, 70
TURN_POLL_SECONDS = 0.02
MAX_CONSECUTIVE_FAILURES = 3
"""Consecutive engine failures after which the process ends and is replaced, since CUDA errors are permanent."""


@dataclass(eq=False)
class Work:
    request: ScoreRequest
    readings: list[Reading]
    deadline: float

    @property
    def options(self) -> tuple[int, float, int | None, str | None]:
        """Arguments of `ScoringEngine.add` besides the readings."""
        return self.request.topk, self.request.temperature, self.request.num_ids, self.request.adapter or None


class BusyTime:
    """Measures the fraction of the last `BUSY_SECONDS` with work."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque()
        self._since: float | None = None

    def note(self, busy: bool) -> None:
        """Record whether there is work from now on."""
        now = time.monotonic()
        if busy and self._since is None:
            self._since = now
        elif not busy and self._since is not None:
            self._spans.append((self._since, now))
            self._since = None
        self._forget(now)

    def fraction(self) -> float:
        """Return the busy fraction, from 0 to 1."""
        now = time.monotonic()
        self._forget(now)
        spans = [*self._spans, *([(self._since, now)] if self._since is not None else [])]
        return min(1.0, sum(end - max(start, now - BUSY_SECONDS) for start, end in spans) / BUSY_SECONDS)

    def _forget(self, now: float) -> None:
        while self._spans and self._spans[0][1] <= now - BUSY_SECONDS:
            self._spans.popleft()


class Link:
    """The worker's connection to the broker, in a background thread.

    It registers the worker, and registers it again if the broker is silent: it was restarted, or has dropped this
    worker. It answers pings with the ids of the held requests, and refuses requests that cannot be scored.
    """

    def __init__(self, address: str, registration: protocol.Register, keys: Keys | None):
        self._address, self._registration, self._keys = address, registration, keys
        self.inbox: queue.SimpleQueue[Work | BaseException] = queue.SimpleQueue()
        """Work for the engine; an exception means that the link has ended."""
        self._context = zmq.Context()
        self._replies = self._context.socket(zmq.PAIR)
        self._replies.bind("inproc://replies")
        self._held: dict[str, float] = {}
        """Deadlines of the unanswered requests, by id."""
        self._registered = 0.0
        """Monotonic time of the last registration."""
        self._busy = BusyTime()
        threading.Thread(target=self._serve, name="link", daemon=True).start()

    def reply(self, message: Reply, arrays: list[np.ndarray]) -> None:
        """Send a reply; called by the engine's thread."""
        self._replies.send_multipart([message.id.encode(), *protocol.encode_message(message, arrays)], copy=False)

    def _serve(self) -> None:
        try:
            replies = self._context.socket(zmq.PAIR)
            replies.connect("inproc://replies")
            broker = Dealer(self._context, self._address, protocol.MAX_REQUEST_BYTES, self._keys, "workers")
            while True:  # an error ends the loop
                poller = zmq.Poller()  # a new one, because the socket may have been reopened
                poller.register(replies, zmq.POLLIN)
                broker.register(poller)
                ready = dict(poller.poll(200))
                if broker.read_events():  # the broker may have restarted or lost messages
                    self._register(broker)
                if broker.refused:
                    raise TeacherError(f"{self._address}: cannot join the broker: {broker.refused}")
                if replies in ready:
                    name, *reply = replies.recv_multipart(copy=False)
                    self._held.pop(name.bytes.decode(), None)
                    self._busy.note(bool(self._held))
                    broker.send_frames(reply)  # if it is lost, the broker sends the request again
                for message, frames in broker.receive():
                    self._handle(broker, message, frames)
                if (version := broker.foreign_version) is not None:
                    raise TeacherError(f"{self._address}: the broker has {protocol.ForeignVersion(version)}")
                now = time.monotonic()
                silent = now > broker.heard + protocol.LIVENESS_SECONDS
                if silent and now > self._registered + protocol.PING_INTERVAL_SECONDS:
                    self._register(broker)
                broker.reopen_if_stuck(now)
                # An engine that holds a request long after its deadline hangs.
                if min(self._held.values(), default=now) < now - HUNG_SECONDS:
                    text = "the engine has not answered %.0f s after the end of a client's request_timeout: it hangs"
                    log.critical(text, HUNG_SECONDS)
                    os._exit(HUNG_EXIT_CODE)  # the engine's thread cannot be interrupted
        except BaseException as error:
            self.inbox.put(error)

    def _register(self, broker: Dealer) -> None:
        self._registered = time.monotonic()
        broker.send(self._registration)

    def _handle(self, broker: Dealer, message: AnyMessage, frames: list[Buffer]) -> None:
        match message:
            case protocol.Ping():
                busy = self._busy.fraction()
                broker.send(protocol.Pong(number=message.number, pending=list(self._held), engine_busy=busy))
            case protocol.Registered():
                log.info("registered with the broker at %s", self._address)
                with contextlib.suppress(queue.Empty):
                    while True:  # the broker has reassigned this work, or was restarted
                        self.inbox.get_nowait()
                self._held.clear()
                self._busy.note(False)
            case protocol.Rejected():
                raise TeacherError(message.reason)
            case ScoreRequest():
                try:
                    readings = protocol.unpack_request(message, frames)
                    check_request(message, readings, self._registration.model)
                except TeacherError as error:
                    code = "refused" if isinstance(error, TeacherRefused) else "failed"
                    broker.send(_error(message, code, str(error)))
                    return
                self._held[message.id] = deadline = time.monotonic() + message.timeout_seconds
                self._busy.note(True)
                self.inbox.put(Work(message, readings, deadline))


class ScoringWorker:
    """Scores the requests of the broker at `address` (host:port) until the link ends or the engine breaks.

    With `turns`, of which it must have the present one, the engine sleeps while it is another worker's turn.
    """

    def __init__(self, engine: ScoringEngine, address: str, keys: Keys | None = None, turns: GpuTurns | None = None):
        self._engine, self._turns = engine, turns
        name = f"{socket.gethostname()}:{os.getpid()}"
        self._name = f"teacher worker {name}"
        self._link = Link(address, protocol.Register(name=name, model=engine.info, credits=CREDITS), keys)
        self._num_failures = 0

    def run(self) -> None:
        """Score requests forever. Raises TeacherError: the broker rejects this worker, or the engine keeps failing."""
        while True:
            batch = self._next_batch()
            done: Iterable[tuple[Work, list[TopK]]]
            try:
                for work in batch:
                    self._engine.add(work, work.readings, *work.options)
                done = self._engine.step()
            except Exception as error:
                # As text, because the traceback's frames would keep the engine's tensors in memory.
                done = self._one_by_one(f"{type(error).__name__}: {error}", batch)
            for work, scores in done:
                self._num_failures = 0
                result = ScoreResult(id=work.request.id, attempt=work.request.attempt, server=self._name)
                self._link.reply(result, protocol.result_arrays(scores))

    def _next_batch(self) -> list[Work]:
        """Return queued requests, up to PREFETCH_TOKENS in the engine; wait for one if it is idle."""
        batch: list[Work] = []
        num_tokens = self._engine.num_tokens
        while num_tokens < PREFETCH_TOKENS:
            try:
                # No deadline: an idle worker waits for work as long as its broker or its parent lives.
                if self._turns is not None:
                    work = self._get_in_turn(self._turns, num_tokens)
                else:
                    work = self._link.inbox.get(block=num_tokens == 0)
            except queue.Empty:
                break
            if isinstance(work, BaseException):
                raise work
            if work.deadline > time.monotonic():
                batch.append(work)
                num_tokens += work.request.num_tokens
            else:  # the broker has answered it already; the reply frees the credit
                reason = "the client's request_timeout passed at the worker"
                self._link.reply(_error(work.request, "expired", reason), [])
        return batch

    def _get_in_turn(self, turns: GpuTurns, num_tokens: int) -> Work | BaseException:
        """Return queued work; wait for it, and for the GPU, if the engine is idle. Raises queue.Empty."""
        while True:
            try:
                work = self._link.inbox.get(block=num_tokens == 0, timeout=TURN_POLL_SECONDS)
            except queue.Empty:
                if num_tokens:
                    raise
                if turns.is_awaited:
                    self._engine.sleep()
                    turns.release()
                    log.info("asleep: another teacher needs the GPU")
                continue
            if not turns.has_turn:
                turns.take()
                self._engine.wake()
                log.info("awake")
            return work

    def _one_by_one(self, failure: str, batch: list[Work]) -> Iterator[tuple[Work, list[TopK]]]:
        """After an exception, score the requests one by one to isolate the faulty one."""
        pending = list(dict.fromkeys([*self._engine.clear(), *batch]))  # the batch may have been added in part
        log.warning("the engine failed with %d requests: %s", len(pending), failure)
        for work in pending:
            try:
                scores = self._engine.score(work.readings, *work.options)
            except Exception as own_error:
                self._engine.clear()
                log.error("the engine failed on request %s", work.request.id, exc_info=own_error)
                reason = f"{self._name}: the engine failed: {type(own_error).__name__}: {own_error}"
                self._link.reply(_error(work.request, "failed", reason), [])
                self._num_failures += 1
                if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
                    time.sleep(0.5)  # let the link send the reply
                    last = f"the engine failed {self._num_failures} times in a row, last with {own_error}"
                    raise TeacherError(last) from own_error
            else:
                yield work, scores


def _error(request: ScoreRequest, code: str, reason: str) -> ScoreError:
    return ScoreError(id=request.id, attempt=request.attempt, code=code, reason=reason[:2000])

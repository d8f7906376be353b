"""A worker: one process with one scoring engine that serves one broker.

The main thread belongs to the engine. A second thread owns the socket, so that pings are answered while
the engine computes; the two hand each other messages through a queue (work) and an inproc socket (replies).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field

import numpy as np
import zmq

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.engines import ScoringEngine
from hybrid_gkd.teacher.protocol import Reply, ScoreError, ScoreRequest, ScoreResult, TokenIds
from hybrid_gkd.types import TeacherTopK

log = logging.getLogger(__name__)

CREDITS = 16
"""Requests held at a time: enough to fill an engine call while the next one arrives."""
TOKENS_PER_CALL = 32768
"""Requests are packed into one engine call up to this many tokens; a longer one goes alone."""
MAX_CONSECUTIVE_FAILURES = 3
"""An engine that fails this often in a row is broken (a CUDA error stays); the process ends and is replaced."""


@dataclass(eq=False)
class Work:
    """One request and the time by which its answer is of no more use."""

    request: ScoreRequest
    sequences: list[tuple[TokenIds, TokenIds]]
    deadline: float


@dataclass(eq=False)
class Link:
    """The worker's end of the connection to the broker; `serve` runs in its own thread.

    It registers, registers again when the broker has been silent (restarted, or it took this worker for
    dead), answers pings with what the worker holds, and turns away what cannot be scored.
    """

    address: str
    registration: protocol.Register
    inbox: queue.SimpleQueue[Work | BaseException] = field(default_factory=queue.SimpleQueue)
    """Work for the engine; an exception says that the link has ended."""

    def __post_init__(self) -> None:
        self._context = zmq.Context()
        self._replies = self._context.socket(zmq.PAIR)
        self._replies.bind("inproc://replies")
        self._held: set[str] = set()
        self._heard = time.monotonic()
        self._next_registration = 0.0
        threading.Thread(target=self._serve, name="link", daemon=True).start()

    def reply(self, message: Reply, arrays: list[np.ndarray]) -> None:
        """Called by the engine's thread."""
        self._replies.send_multipart(protocol.encode(message, arrays), copy=False)

    def _serve(self) -> None:
        try:
            broker = self._context.socket(zmq.DEALER)
            network.configure(broker, protocol.MAX_REPLY_BYTES)
            broker.setsockopt(zmq.ROUTING_ID, uuid.uuid4().bytes)  # survives reconnects
            broker.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a broker that is away
            broker.connect(network.endpoint_url(self.address))
            replies = self._context.socket(zmq.PAIR)
            replies.connect("inproc://replies")
            poller = zmq.Poller()
            poller.register(broker, zmq.POLLIN)
            poller.register(replies, zmq.POLLIN)
            while True:
                ready = dict(poller.poll(200))
                if replies in ready:
                    self._forward(broker, replies.recv_multipart(copy=False))
                if broker in ready:
                    self._receive(broker)
                self._keep_registered(broker)
        except BaseException as error:
            self.inbox.put(error)

    def _keep_registered(self, broker: zmq.Socket) -> None:
        now = time.monotonic()
        silent = now - self._heard > protocol.LIVENESS_SECONDS
        if now >= self._next_registration and (silent or self._next_registration == 0.0):
            self._next_registration = now + protocol.PING_INTERVAL_SECONDS
            _send(broker, protocol.encode(self.registration))

    def _forward(self, broker: zmq.Socket, frames: list[zmq.Frame]) -> None:
        message = protocol.decode_header(frames[0].buffer)
        assert isinstance(message, ScoreResult | ScoreError)
        self._held.discard(message.id)
        _send(broker, frames)

    def _receive(self, broker: zmq.Socket) -> None:
        frames = broker.recv_multipart(copy=False)
        message = protocol.decode_header(frames[0].buffer)
        self._heard = time.monotonic()
        match message:
            case protocol.Ping():
                pong = protocol.Pong(number=message.number, instance="", pending=list(self._held))
                _send(broker, protocol.encode(pong))
            case protocol.Registered():
                log.info("registered with the broker at %s", self.address)
                with contextlib.suppress(queue.Empty):
                    while True:  # the broker has given all of it to others, or is a new one
                        self.inbox.get_nowait()
                self._held.clear()
            case ScoreRequest():
                self._held.add(message.id)
                self._take(broker, message, frames[1:])
            case protocol.Rejected():
                raise TeacherError(message.reason)

    def _take(self, broker: zmq.Socket, request: ScoreRequest, frames: list[zmq.Frame]) -> None:
        try:
            sequences = protocol.unpack_request(request, [frame.buffer for frame in frames])
        except protocol.ProtocolError as error:
            code, reason = "failed", str(error)
        else:
            code, reason = "refused", protocol.refusal(request, sequences, self.registration.model) or ""
        if reason:
            self._forward(broker, [zmq.Frame(frame) for frame in protocol.encode(_error(request, code, reason))])
        else:
            self.inbox.put(Work(request, sequences, time.monotonic() + request.timeout_seconds))


class Worker:
    """Scores what the broker at `address` (host:port) hands out, until the link ends or the engine breaks."""

    def __init__(self, engine: ScoringEngine, address: str):
        self._engine = engine
        self._name = f"teacher worker {socket.gethostname()}:{os.getpid()}"
        self._link = Link(
            address,
            protocol.Register(protocol_version=protocol.PROTOCOL_VERSION, model=engine.info, credits=CREDITS),
        )
        self._kept: Work | None = None
        self._num_failures = 0

    def run(self) -> None:
        """Raises TeacherError when the broker turns this worker away or the engine keeps failing."""
        while True:
            now, batch = time.monotonic(), []
            for work in self._next_batch():
                if work.deadline > now:
                    batch.append(work)
                else:  # the broker has answered it already; this frees the credit
                    self._link.reply(_error(work.request, "expired", "the deadline passed at the worker"), [])
            if batch:
                self._score(batch)

    def _next_batch(self) -> list[Work]:
        """Wait for work, then take along what is waiting already and fits into the same engine call."""
        # No deadline: an idle worker waits for work for as long as its broker or its parent lives.
        first = self._kept or _checked(self._link.inbox.get())
        self._kept = None
        batch, num_tokens = [first], first.request.num_tokens
        while True:
            try:
                work = _checked(self._link.inbox.get_nowait())
            except queue.Empty:
                break
            num_tokens += work.request.num_tokens
            if num_tokens > TOKENS_PER_CALL or _settings(work) != _settings(first):
                self._kept = work
                break
            batch.append(work)
        return batch

    def _score(self, batch: list[Work]) -> None:
        sequences = [sequence for work in batch for sequence in work.sequences]
        try:
            scores = self._engine.score(sequences, *_settings(batch[0]))
        except Exception as error:
            if len(batch) > 1:  # find the request that the engine cannot bear
                for work in batch:
                    self._score([work])
                return
            self._on_failure(batch[0], error)
            return
        self._num_failures = 0
        for work in batch:
            own, scores = scores[: len(work.sequences)], scores[len(work.sequences) :]
            self._answer(work.request, own)

    def _answer(self, request: ScoreRequest, scores: list[TeacherTopK]) -> None:
        result = ScoreResult(id=request.id, attempt=request.attempt, server=self._name)
        self._link.reply(result, protocol.result_arrays(scores))

    def _on_failure(self, work: Work, error: Exception) -> None:
        log.exception("the engine failed on request %s", work.request.id)
        self._num_failures += 1
        reason = f"{self._name}: the engine failed: {type(error).__name__}: {error}"
        self._link.reply(_error(work.request, "failed", reason), [])
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            time.sleep(0.5)  # let the link send the reply
            raise TeacherError(f"the engine failed {self._num_failures} times in a row, last with {error}") from error


def _checked(work: Work | BaseException) -> Work:
    if isinstance(work, BaseException):
        raise work
    return work


def _settings(work: Work) -> tuple[int, float]:
    return work.request.topk, work.request.temperature


def _error(request: ScoreRequest, code: str, reason: str) -> ScoreError:
    return ScoreError(id=request.id, attempt=request.attempt, code=code, reason=reason[:2000])


def _send(broker: zmq.Socket, frames: list) -> None:
    try:
        broker.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        log.debug("the broker is away; it asks again for what it misses")

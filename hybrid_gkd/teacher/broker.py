"""The broker: one thread that hands requests of clients to workers with a free credit.

It reads headers only and passes array frames on untouched; checksums are verified at both ends. What it
promises: a request is answered exactly once, by a result or by an error; a worker that dies or loses a
request costs time, not the request; no message, however malformed, ends the loop.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.protocol import Reply, ScoreError, ScoreRequest, ScoreResult

log = logging.getLogger(__name__)

MAX_HELD_REQUESTS = 4096
MAX_HELD_BYTES = 1 << 30
MAX_LOSSES = 3
"""After this many workers died on a request it is probably the cause; its client is told."""
MESSAGES_PER_TURN = 64
"""Read from one socket before the other gets its turn."""
POLL_MILLISECONDS = 200
RATE_WINDOW_SECONDS = 10.0


@dataclass(eq=False)
class Ticket:
    """A request from its arrival to its one answer. Workers know it by `id`, the client by `request.id`."""

    id: str
    client: bytes
    """Routing id; empty for the test request that every new worker has to pass."""
    request: ScoreRequest
    payload: list[zmq.Frame]
    num_bytes: int
    deadline: float
    worker: bytes | None = None
    sent_at_ping: int = 0
    tried: set[bytes] = field(default_factory=set)
    losses: int = 0


@dataclass(eq=False)
class Worker:
    model: protocol.ModelInfo
    credits: int
    heard: float
    """Monotonic time of the last message."""
    held: set[str] = field(default_factory=set)
    """Tickets that occupy a credit."""
    tested: bool = False

    @property
    def free(self) -> int:
        return self.credits - len(self.held) if self.tested else 0


class Broker:
    """Binds both ports on construction; `run` serves until its callback says stop.

    Raises TeacherError when a port is taken, with the option that sets it.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int = 15555, worker_port: int = 15556):
        self.instance = uuid.uuid4().hex
        self._context = zmq.Context()
        self._clients = self._context.socket(zmq.ROUTER)
        self._worker_socket = self._context.socket(zmq.ROUTER)
        try:
            self.port = network.bind(
                self._clients, host, port, "--port", protocol.MAX_REQUEST_BYTES, 4 * MAX_HELD_REQUESTS
            )
            self.worker_port = network.bind(
                self._worker_socket, host, worker_port, "--worker-port", protocol.MAX_REPLY_BYTES, 4 * MAX_HELD_REQUESTS
            )
        except BaseException:
            self.close()
            raise
        self._model: protocol.ModelInfo | None = None
        self._workers: dict[bytes, Worker] = {}
        self._tickets: dict[str, Ticket] = {}
        self._by_request: dict[tuple[bytes, str], Ticket] = {}
        self._queue: deque[Ticket] = deque()
        self._held_bytes = 0
        self._num_tickets = 0
        self._ping_number = 0
        self._next_ping = 0.0
        self._started = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque()
        self.counters: Counter[str] = Counter(
            {name: 0 for name in ("delivered", "tokens", "refused", "requeued", "expired", "late", "malformed")}
        )

    @property
    def num_workers(self) -> int:
        """Workers alive that have answered their test request."""
        return sum(worker.tested for worker in self._workers.values())

    def close(self) -> None:
        self._context.destroy(linger=0)

    def run(self, keep_running: Callable[[], bool]) -> None:
        """Serve; `keep_running` is asked several times a second."""
        poller = zmq.Poller()
        handlers = {self._clients: self._from_client, self._worker_socket: self._from_worker}
        for each in handlers:
            poller.register(each, zmq.POLLIN)
        while keep_running():
            for ready, _ in poller.poll(POLL_MILLISECONDS):
                self._read(ready, handlers[ready])
            self._ping_workers()
            self._drop_dead_workers()
            self._expire()
            self._dispatch()

    def _read(self, source: zmq.Socket, handle: Callable[[bytes, protocol.AnyMessage, list[zmq.Frame]], None]) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if not 2 <= len(frames) <= 2 + protocol.MAX_ARRAYS:
                    raise protocol.ProtocolError(f"{len(frames)} frames")
                handle(frames[0].bytes, protocol.decode_header(frames[1].buffer), frames[2:])
            except protocol.ProtocolError as error:
                self.counters["malformed"] += 1
                log.debug("dropped a malformed message: %s", error)

    # Clients

    def _from_client(self, client: bytes, message: protocol.AnyMessage, payload: list[zmq.Frame]) -> None:
        match message:
            case protocol.Hello():
                _send(self._clients, client, protocol.Welcome(
                    protocol_version=protocol.PROTOCOL_VERSION, instance=self.instance,
                    num_workers=self.num_workers, model=self._model,
                ))  # fmt: skip
            case ScoreRequest():
                self._accept(client, message, payload)
            case protocol.Ping():
                pending = [request_id for owner, request_id in self._by_request if owner == client]
                _send(
                    self._clients, client, protocol.Pong(number=message.number, instance=self.instance, pending=pending)
                )
            case protocol.StatusRequest():
                _send(self._clients, client, self.status())
            case _:
                raise protocol.ProtocolError(f"a client may not send {type(message).__name__}")

    def _accept(self, client: bytes, request: ScoreRequest, payload: list[zmq.Frame]) -> None:
        known = self._by_request.get((client, request.id))
        if known is not None:
            # The client lost patience. The request keeps its place; a second worker may try it.
            known.request, known.deadline = request, time.monotonic() + request.timeout_seconds
            if known.worker is not None and any(
                worker.tested and identity not in known.tried for identity, worker in self._workers.items()
            ):
                self._requeue(known)
            return
        num_bytes = sum(len(frame) for frame in payload)
        if len(self._tickets) >= MAX_HELD_REQUESTS or self._held_bytes + num_bytes > MAX_HELD_BYTES:
            self.counters["refused"] += 1
            reason = f"the queue is full ({len(self._tickets)} requests, {self._held_bytes} bytes)"
            error = ScoreError(id=request.id, attempt=request.attempt, code="busy", reason=reason)
            _send(self._clients, client, error)
            return
        self._queue.append(self._new_ticket(client, request, payload))

    def _new_ticket(self, client: bytes, request: ScoreRequest, payload: list[zmq.Frame]) -> Ticket:
        self._num_tickets += 1
        ticket = Ticket(
            id=f"{self.instance}-{self._num_tickets}", client=client, request=request, payload=payload,
            num_bytes=sum(len(frame) for frame in payload), deadline=time.monotonic() + request.timeout_seconds,
        )  # fmt: skip
        self._tickets[ticket.id] = ticket
        self._held_bytes += ticket.num_bytes
        if client:
            self._by_request[client, request.id] = ticket
        return ticket

    def _finish(self, ticket: Ticket, answer: Reply, payload: list[zmq.Frame]) -> None:
        """Answer the client and forget the ticket: whatever still comes for it is late."""
        del self._tickets[ticket.id]
        self._held_bytes -= ticket.num_bytes
        if ticket.client:
            del self._by_request[ticket.client, ticket.request.id]
            answer = msgspec.structs.replace(answer, id=ticket.request.id, attempt=ticket.request.attempt)
            _send(self._clients, ticket.client, answer, payload)

    def _fail(self, ticket: Ticket, code: str, reason: str) -> None:
        self._finish(ticket, ScoreError(id=ticket.id, attempt=0, code=code, reason=reason), [])

    # Workers

    def _from_worker(self, identity: bytes, message: protocol.AnyMessage, payload: list[zmq.Frame]) -> None:
        if isinstance(message, protocol.Register):
            self._register(identity, message)
            return
        worker = self._workers.get(identity)
        if worker is not None:
            worker.heard = time.monotonic()
        match message:
            case protocol.Pong():
                if worker is not None:
                    self._recover_lost(identity, worker, message)
            case ScoreResult() | ScoreError():
                self._on_reply(identity, message, payload)
            case _:
                raise protocol.ProtocolError(f"a worker may not send {type(message).__name__}")

    def _register(self, identity: bytes, message: protocol.Register) -> None:
        reason = None
        if message.protocol_version != protocol.PROTOCOL_VERSION:
            reason = f"protocol version {message.protocol_version}, this broker speaks {protocol.PROTOCOL_VERSION}"
        elif self._model is not None and message.model != self._model:
            reason = f"it serves {message.model}, this broker's clients were promised {self._model}"
        if reason:
            self._reject(identity, f"the broker turned the worker away: {reason}")
            return
        if identity in self._workers:
            self._drop_worker(identity)
        self._workers[identity] = Worker(model=message.model, credits=message.credits, heard=time.monotonic())
        _send(self._worker_socket, identity, protocol.Registered())
        self._send_test_request(identity, message.model)

    def _reject(self, identity: bytes, reason: str) -> None:
        log.warning("worker turned away: %s", reason)
        _send(self._worker_socket, identity, protocol.Rejected(reason=reason))

    def _send_test_request(self, identity: bytes, model: protocol.ModelInfo) -> None:
        request = ScoreRequest(
            id="test", attempt=0, timeout_seconds=3600.0, topk=min(model.max_topk, 2), temperature=1.0,
            prompt_lengths=[1], response_lengths=[1],
        )  # fmt: skip
        header, array = protocol.encode(request, [np.array([0, 1], np.int32)])
        request = msgspec.structs.replace(request, arrays=protocol.decode_header(header).arrays)
        self._send_ticket(self._new_ticket(b"", request, [zmq.Frame(array)]), identity)

    def _judge_test(
        self, identity: bytes, worker: Worker, ticket: Ticket, reply: Reply, frames: list[zmq.Frame]
    ) -> None:
        """A worker gets work once its answer to the test request has passed the checks of a client."""
        reason = None
        if isinstance(reply, ScoreError):
            reason = reply.reason
        elif self._model not in (None, worker.model):
            reason = f"another worker registered {self._model} first"
        else:
            try:
                protocol.unpack_result(
                    reply, [frame.buffer for frame in frames], server=reply.server, topk=ticket.request.topk,
                    vocab_size=worker.model.num_embeddings, response_lengths=[1],
                )  # fmt: skip
            except TeacherError as error:
                reason = str(error)
        if reason:
            del self._workers[identity]
            self._reject(identity, f"the test request failed: {reason}")
            return
        self._model = worker.model
        worker.tested = True
        log.info("a worker joined, %d alive", self.num_workers)

    def _on_reply(self, identity: bytes, reply: Reply, payload: list[zmq.Frame]) -> None:
        worker, ticket = self._workers.get(identity), self._tickets.get(reply.id)
        if worker is not None:
            worker.held.discard(reply.id)
        if ticket is None or identity not in ticket.tried:
            self.counters["late"] += 1
            return
        self._finish(ticket, reply, payload)
        if not ticket.client:
            if worker is not None:
                self._judge_test(identity, worker, ticket, reply, payload)
        elif isinstance(reply, ScoreResult):
            self.counters["delivered"] += 1
            self.counters["tokens"] += ticket.request.num_tokens
            self._recent.append((time.monotonic(), ticket.request.num_tokens))
        else:
            self.counters["refused"] += 1

    def _ping_workers(self) -> None:
        now = time.monotonic()
        if now < self._next_ping:
            return
        self._next_ping = now + protocol.PING_INTERVAL_SECONDS
        self._ping_number += 1
        for identity in self._workers:
            _send(self._worker_socket, identity, protocol.Ping(number=self._ping_number))

    def _recover_lost(self, identity: bytes, worker: Worker, pong: protocol.Pong) -> None:
        """Queue again what the worker should hold but does not: its connection broke in between."""
        for ticket_id in worker.held.difference(pong.pending):
            ticket = self._tickets.get(ticket_id)
            if ticket is None:  # answered by another worker or expired; the credit was all that was left
                worker.held.discard(ticket_id)
            elif ticket.worker == identity and ticket.sent_at_ping < pong.number:
                worker.held.discard(ticket_id)
                self._requeue(ticket)

    def _drop_dead_workers(self) -> None:
        oldest = time.monotonic() - protocol.LIVENESS_SECONDS
        for identity in [identity for identity, worker in self._workers.items() if worker.heard < oldest]:
            log.warning("a worker was silent for %.0f s and counts as dead", protocol.LIVENESS_SECONDS)
            self._drop_worker(identity)

    def _drop_worker(self, identity: bytes) -> None:
        for ticket_id in self._workers.pop(identity).held:
            ticket = self._tickets.get(ticket_id)
            if ticket is None or ticket.worker != identity:
                continue
            ticket.losses += 1
            if not ticket.client or ticket.losses >= MAX_LOSSES:
                self._fail(ticket, "failed", f"{ticket.losses} workers died while they held the request")
            else:
                self._requeue(ticket)

    # Queue

    def _requeue(self, ticket: Ticket) -> None:
        ticket.worker = None
        self._queue.appendleft(ticket)
        self.counters["requeued"] += 1

    def _dispatch(self) -> None:
        """Give the oldest requests to the workers with the most free credits."""
        while self._queue:
            if self._queue[0].id not in self._tickets:
                self._queue.popleft()
                continue
            free = {identity: worker.free for identity, worker in self._workers.items() if worker.free > 0}
            if not free:
                return
            ticket = self._queue.popleft()
            self._send_ticket(ticket, max(free, key=lambda each: (each not in ticket.tried, free[each])))

    def _send_ticket(self, ticket: Ticket, identity: bytes) -> None:
        ticket.worker, ticket.sent_at_ping = identity, self._ping_number
        ticket.tried.add(identity)
        self._workers[identity].held.add(ticket.id)
        remaining = max(0.0, ticket.deadline - time.monotonic())
        request = msgspec.structs.replace(ticket.request, id=ticket.id, timeout_seconds=remaining)
        _send(self._worker_socket, identity, request, ticket.payload)

    def _expire(self) -> None:
        now = time.monotonic()
        for ticket in [ticket for ticket in self._tickets.values() if ticket.deadline <= now]:
            self.counters["expired"] += 1
            where = "waiting for a worker" if ticket.worker is None else "at a worker"
            self._fail(ticket, "expired", f"the deadline passed while the request was {where}")

    def status(self) -> protocol.Status:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_SECONDS:
            self._recent.popleft()
        in_flight = sum(ticket.worker is not None for ticket in self._tickets.values())
        uptime = now - self._started
        return protocol.Status(
            model=self._model,
            num_workers=self.num_workers,
            queue_length=len(self._tickets) - in_flight,
            num_in_flight=in_flight,
            tokens_per_second=sum(tokens for _, tokens in self._recent) / min(RATE_WINDOW_SECONDS, max(uptime, 1.0)),
            uptime_seconds=uptime,
            counters=dict(self.counters),
        )


def _send(
    target: zmq.Socket, identity: bytes, message: protocol.AnyMessage, payload: list[zmq.Frame] | None = None
) -> None:
    frames = [identity, *protocol.encode(message), *(payload or [])]
    try:
        target.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:  # the peer's connection is gone; pings and deadlines take care of the rest
        log.debug("could not send %s: %s", type(message).__name__, error)

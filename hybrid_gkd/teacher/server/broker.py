"""The broker: one thread that hands requests of clients to workers with a free credit.

It reads headers only and passes array frames on untouched; checksums are verified at both ends. Its guarantees: a
request is answered exactly once, by a result or by an error; a worker that dies, hangs or loses a request costs time,
not the request; no message, however malformed, ends the loop; a client that floods it or does not read costs the
others nothing but their place in the queue.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import zmq

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.keys import Keys
from hybrid_gkd.teacher.protocol import AnyMessage, Reply, ScoreError, ScoreRequest, ScoreResult
from hybrid_gkd.teacher.server.records import ClientRecord, Ticket, WorkerRecord
from hybrid_gkd.teacher.server.statistics import Statistics

log = logging.getLogger(__name__)

MAX_UNSENT_TO_CLIENT = 256
"""Messages that wait for one client to read them; it gets no more before it does."""
MAX_UNSENT_TO_WORKER = 2048
MAX_HELD_REQUESTS, MAX_HELD_PER_CLIENT, MAX_HELD_BYTES = 4096, 256, 1 << 30
MAX_WORKER_DEATHS = 3
"""A request on which this many workers died is probably the cause, and fails."""
CLIENT_SECONDS = 30.0
"""Inactivity timeout of a client; after it, its requests are given up."""
HEDGE_SECONDS, HEDGE_FACTOR = 10.0, 4.0
"""A worker that keeps a request for this long, and for so many 99th percentiles, may hang: another one gets it too."""
POLL_MILLISECONDS = 200
FLUSH_MILLISECONDS = 2000
"""For the last answers to leave when the broker closes."""


class Broker:
    """Binds both ports on construction, and raises TeacherError with the option of a port that is taken.

    With `keys`, connections are encrypted and only clients and workers on the allow-list get in.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int, worker_port: int, keys: Keys | None = None):
        self.instance = uuid.uuid4().hex
        self._clients: dict[bytes, ClientRecord] = {}
        self._workers: dict[bytes, WorkerRecord] = {}
        self._tickets: dict[str, Ticket] = {}
        """Every request until it is answered or its client is gone."""
        self._queue: OrderedDict[str, Ticket] = OrderedDict()
        """Those without a worker."""
        self._held_bytes = 0
        self._context = zmq.Context()
        self._authenticator = network.start_authenticator(self._context, keys) if keys else None
        self._client_socket = self._context.socket(zmq.ROUTER)
        self._worker_socket = self._context.socket(zmq.ROUTER)
        try:
            self.port = network.bind(
                self._client_socket, host, port, "--port", keys=keys,
                max_message_bytes=protocol.MAX_REQUEST_BYTES, max_unsent=MAX_UNSENT_TO_CLIENT,
            )
            self.worker_port = network.bind(
                self._worker_socket, host, worker_port, "--worker-port", keys=keys,
                max_message_bytes=protocol.MAX_REPLY_BYTES, max_unsent=MAX_UNSENT_TO_WORKER,
            )
        except BaseException:
            self.close()
            raise
        self.model: protocol.ModelInfo | None = None
        """None until the first worker has been tested."""
        self._ping_number = 0
        self._draining = False
        self._statistics = Statistics()
        self.counters = self._statistics.counters

    @property
    def num_workers(self) -> int:
        """Workers alive that have answered their test request."""
        return sum(worker.tested for worker in self._workers.values())

    @property
    def num_held(self) -> int:
        """Requests of clients that have no answer yet."""
        return len(self._tickets)

    def num_delivered(self, worker_name: str) -> int:
        """Results of the live worker with this name."""
        return sum(worker.num_delivered for worker in self._workers.values() if worker.name == worker_name)

    def drain(self) -> None:
        """Take no new requests; those that are here are still answered."""
        self._draining = True

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        someone_reads = any(not client.blocked for client in self._clients.values())
        self._context.destroy(linger=FLUSH_MILLISECONDS if someone_reads else 0)

    def run(self, keep_running: Callable[[], bool]) -> None:
        """Serve; `keep_running` is asked several times a second."""
        poller, next_ping, last_turn = zmq.Poller(), 0.0, time.monotonic()
        handlers = {self._client_socket: self._from_client, self._worker_socket: self._from_worker}
        for each in handlers:
            poller.register(each, zmq.POLLIN)
        while keep_running():
            for ready, _ in poller.poll(POLL_MILLISECONDS):
                self._read(ready, handlers[ready])
            now = time.monotonic()
            if now - last_turn > protocol.LIVENESS_SECONDS / 2:  # while it did not listen, no peer was inactive
                peers: list[WorkerRecord | ClientRecord] = [*self._workers.values(), *self._clients.values()]
                for peer in peers:
                    peer.heard = now
            last_turn = now
            if now >= next_ping:
                next_ping = now + protocol.PING_INTERVAL_SECONDS
                self._check_workers(now)
            self._time_out()
            self._dispatch()

    def _read(self, source: zmq.Socket, handle: Callable[[bytes, AnyMessage, list[zmq.Frame]], None]) -> None:
        for _ in range(network.MESSAGES_PER_TURN):
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
                if isinstance(error, protocol.ForeignVersion):  # the peer reports it: every message carries our version
                    rejected = protocol.Rejected(reason=str(error))
                    _send(source, frames[0].bytes, self._welcome() if source is self._client_socket else rejected)

    # Clients

    def _from_client(self, identity: bytes, message: AnyMessage, payload: list[zmq.Frame]) -> None:
        if isinstance(message, protocol.StatusRequest):
            _send(self._client_socket, identity, self.status())
            return
        client = self._clients.setdefault(identity, ClientRecord(identity))
        client.heard = time.monotonic()
        match message:
            case protocol.Hello():
                self._to_client(client, self._welcome())
            case ScoreRequest():
                self._accept(client, message, payload)
            case protocol.Ping():
                self._to_client(client, protocol.Pong(
                    number=message.number, instance=self.instance, pending=list(client.tickets),
                    queue_length=len(self._queue), engine_busy=self._engine_busy(),
                ))
            case protocol.Bye():
                self._drop_client(client)
            case _:
                raise protocol.ProtocolError(f"a client may not send {type(message).__name__}")

    def _welcome(self) -> protocol.Welcome:
        num_workers = 0 if self._draining else self.num_workers
        return protocol.Welcome(instance=self.instance, num_workers=num_workers, model=self.model)

    def _to_client(self, client: ClientRecord, message: AnyMessage, payload: list[zmq.Frame] | None = None) -> None:
        errno = _send(self._client_socket, client.identity, message, payload)
        client.blocked = errno == zmq.EAGAIN
        if errno and isinstance(message, ScoreResult | ScoreError):
            self.counters["undelivered"] += 1

    def _accept(self, client: ClientRecord, request: ScoreRequest, payload: list[zmq.Frame]) -> None:
        now, num_bytes = time.monotonic(), sum(map(len, payload))
        deadline, known = now + request.timeout_seconds, client.tickets.get(request.id)
        if known is not None:
            # The client asks again. The request keeps its place; a second worker may try it.
            known.request, known.deadline = request, deadline
            if known.worker is not None and self._has_free_worker(known):
                self._requeue(known)
        elif (busy := self._why_busy(client, num_bytes)) is not None:
            self.counters["refused"] += 1
            self._to_client(client, ScoreError(id=request.id, attempt=request.attempt, code="busy", reason=busy))
        else:
            ticket = Ticket(uuid.uuid4().hex, client, request, payload, now, deadline)
            self._held_bytes += num_bytes
            client.tickets[request.id] = self._tickets[ticket.id] = self._queue[ticket.id] = ticket

    def _why_busy(self, client: ClientRecord, num_bytes: int) -> str | None:
        """Why a request of this size is refused for now."""
        if self._draining:
            return "the service is shutting down"
        if client.blocked:
            return "the client does not read its replies"
        if len(client.tickets) >= MAX_HELD_PER_CLIENT:
            return f"{len(client.tickets)} requests of this client are here, the limit is {MAX_HELD_PER_CLIENT}"
        if num_bytes > protocol.MAX_REQUEST_BYTES:
            return f"the request has {num_bytes} bytes, the limit is {protocol.MAX_REQUEST_BYTES}"
        if len(self._tickets) >= MAX_HELD_REQUESTS or self._held_bytes + num_bytes > MAX_HELD_BYTES:
            return f"the queue is full ({len(self._tickets)} requests, {self._held_bytes} bytes)"
        return None

    def _drop_client(self, client: ClientRecord) -> None:
        self.counters["abandoned"] += len(client.tickets)
        for ticket in list(client.tickets.values()):
            self._close(ticket)
        del self._clients[client.identity]

    def _close(self, ticket: Ticket) -> None:
        """A later answer counts as late."""
        del self._tickets[ticket.id]
        del ticket.client.tickets[ticket.request.id]
        self._queue.pop(ticket.id, None)
        self._held_bytes -= sum(map(len, ticket.payload))

    def _finish(self, ticket: Ticket, answer: Reply, payload: list[zmq.Frame]) -> None:
        """The one answer to the client."""
        self._close(ticket)
        answer = msgspec.structs.replace(answer, id=ticket.request.id, attempt=ticket.request.attempt)
        self._to_client(ticket.client, answer, payload)

    def _fail(self, ticket: Ticket, code: str, reason: str) -> None:
        self._finish(ticket, ScoreError(id=ticket.id, attempt=0, code=code, reason=reason), [])

    # Workers

    def _from_worker(self, identity: bytes, message: AnyMessage, payload: list[zmq.Frame]) -> None:
        worker = self._workers.get(identity)
        if worker is not None:
            worker.heard = time.monotonic()
        match message:
            case protocol.Register():
                self._register(identity, message)
            case protocol.Pong():
                if worker is not None:
                    worker.engine_busy = message.engine_busy
                    self._recover_lost(worker, message)
            case ScoreResult() | ScoreError():
                self._on_reply(identity, worker, message, payload)
            case _:
                raise protocol.ProtocolError(f"a worker may not send {type(message).__name__}")

    def _register(self, identity: bytes, message: protocol.Register) -> None:
        if self.model not in (None, message.model):
            reason = f"it serves {message.model}, this broker's clients were promised {self.model}"
            self._reject(identity, message.name, f"the broker turned the worker away: {reason}")
            return
        if identity in self._workers:  # it lives; the connection was lost, and perhaps messages with it
            self._drop_worker(self._workers[identity], died=False)
        self._workers[identity] = WorkerRecord(identity, message, heard=time.monotonic())
        _send(self._worker_socket, identity, protocol.Registered())
        request, array = protocol.make_test_request(message.model)
        _send(self._worker_socket, identity, request, [zmq.Frame(array)])

    def _reject(self, identity: bytes, name: str, reason: str) -> None:
        log.warning("worker %s: %s", name, reason)
        _send(self._worker_socket, identity, protocol.Rejected(reason=reason))

    def _judge_test(self, worker: WorkerRecord, reply: Reply, frames: list[zmq.Frame]) -> None:
        """A worker gets work once its answer to the test request has passed the checks of a client."""
        model = worker.registration.model
        try:
            if isinstance(reply, ScoreError):
                raise TeacherError(reply.reason)
            if self.model not in (None, model):
                raise TeacherError(f"another worker registered {self.model} first")
            protocol.check_test_result(reply, [frame.buffer for frame in frames], model)
        except TeacherError as error:
            del self._workers[worker.identity]
            self._reject(worker.identity, worker.name, f"the test request failed: {error}")
        else:
            self.model, worker.tested = model, True
            log.info("worker %s joined, %d alive", worker.name, self.num_workers)

    def _on_reply(self, identity: bytes, worker: WorkerRecord | None, reply: Reply, payload: list[zmq.Frame]) -> None:
        ticket = self._tickets.get(reply.id)
        if worker is not None:
            if not worker.tested and reply.id == protocol.TEST_ID:
                self._judge_test(worker, reply, payload)
                return
            worker.held.discard(reply.id)
            worker.suspect = False
        if ticket is None or identity not in ticket.tried:
            self.counters["late"] += 1
            return
        self._finish(ticket, reply, payload)
        if isinstance(reply, ScoreError):
            self.counters["refused"] += 1
            return
        self._statistics.add(ticket, sum(map(len, payload)))
        if worker is not None:
            worker.num_delivered += 1

    def _check_workers(self, now: float) -> None:
        """Ping them. A request that one keeps for too long goes to another one as well; the first answer counts."""
        self._ping_number += 1
        ping = protocol.Ping(number=self._ping_number)
        for worker in list(self._workers.values()):
            if _send(self._worker_socket, worker.identity, ping) == zmq.EHOSTUNREACH:
                log.warning("worker %s: the connection is gone", worker.name)
                self._drop_worker(worker)
        timeout = max(HEDGE_SECONDS, HEDGE_FACTOR * self._statistics.longest_usual_service())
        for ticket in self._tickets.values():
            if ticket.worker is not None and ticket.sent <= now - timeout and self._has_free_worker(ticket):
                ticket.worker.suspect = True
                seconds = now - ticket.sent
                log.warning("worker %s keeps a request for %.0f s, another one gets it", ticket.worker.name, seconds)
                self.counters["hedged"] += 1
                self._requeue(ticket)

    def _has_free_worker(self, ticket: Ticket) -> bool:
        return any(worker.free > 0 and worker.identity not in ticket.tried for worker in self._workers.values())

    def _recover_lost(self, worker: WorkerRecord, pong: protocol.Pong) -> None:
        """Queue requests again that the worker should hold but does not: its connection broke in between."""
        for ticket_id in worker.held.difference(pong.pending):
            ticket = self._tickets.get(ticket_id)
            if ticket is None:  # answered by another worker or expired; the credit was all that was left
                worker.held.discard(ticket_id)
            elif ticket.worker is worker and ticket.sent_at_ping < pong.number:
                worker.held.discard(ticket_id)
                self._requeue(ticket)

    def _time_out(self) -> None:
        """Give up inactive clients, silent workers and requests whose deadline has passed."""
        now = time.monotonic()
        for client in list(self._clients.values()):
            if client.heard < now - CLIENT_SECONDS:
                self._drop_client(client)
        for worker in list(self._workers.values()):
            if worker.heard < now - protocol.LIVENESS_SECONDS:
                log.warning("worker %s was silent for %g s and counts as dead", worker.name, protocol.LIVENESS_SECONDS)
                self._drop_worker(worker)
        for ticket in [each for each in self._tickets.values() if each.deadline <= now]:
            self.counters["expired"] += 1
            where = "waiting for a worker" if ticket.worker is None else "at a worker"
            self._fail(ticket, "expired", f"the client's request_timeout passed while the request was {where}")

    def _drop_worker(self, worker: WorkerRecord, *, died: bool = True) -> None:
        del self._workers[worker.identity]
        for ticket in [each for each in self._tickets.values() if each.worker is worker]:
            ticket.worker_deaths += died
            if ticket.worker_deaths >= MAX_WORKER_DEATHS:
                self._fail(ticket, "failed", f"{ticket.worker_deaths} workers died while they held the request")
            else:
                self._requeue(ticket)

    def _requeue(self, ticket: Ticket) -> None:
        """To the head of the queue."""
        ticket.worker = None
        self._queue[ticket.id] = ticket
        self._queue.move_to_end(ticket.id, last=False)
        self.counters["requeued"] += 1

    def _dispatch(self) -> None:
        """Give the oldest requests to the workers with the most free credits."""
        while self._queue:
            free = [worker for worker in self._workers.values() if worker.free > 0]
            if not free:
                return
            _, ticket = self._queue.popitem(last=False)
            worker = max(free, key=lambda each: (each.identity not in ticket.tried, each.free))
            ticket.worker, ticket.sent, ticket.sent_at_ping = worker, time.monotonic(), self._ping_number
            ticket.tried.add(worker.identity)
            worker.held.add(ticket.id)
            remaining = max(0.0, ticket.deadline - ticket.sent)
            request = msgspec.structs.replace(ticket.request, id=ticket.id, timeout_seconds=remaining)
            _send(self._worker_socket, worker.identity, request, ticket.payload)

    def _engine_busy(self) -> float:
        busy = [worker.engine_busy for worker in self._workers.values() if worker.tested]
        return sum(busy) / max(len(busy), 1)

    def status(self) -> protocol.Status:
        now, queue_length = time.monotonic(), len(self._queue)
        workers = [
            protocol.WorkerStatus(
                name=each.name, ready=each.tested, num_held=len(each.held), num_delivered=each.num_delivered,
                engine_busy=each.engine_busy, silent_seconds=now - each.heard,
            )
            for each in self._workers.values()
        ]
        return protocol.Status(
            model=self.model, num_workers=self.num_workers, queue_length=queue_length,
            num_in_flight=self.num_held - queue_length, engine_busy=self._engine_busy(), workers=workers,
            **self._statistics.figures(),
        )


def _send(target: zmq.Socket, identity: bytes, message: AnyMessage, payload: list[zmq.Frame] | None = None) -> int:
    """0, or the error of zmq: EAGAIN for a peer that does not read, EHOSTUNREACH for one that is gone."""
    frames = [identity, *protocol.encode(message), *(payload or [])]
    try:
        target.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:  # pings and deadlines take care of the rest
        log.debug("could not send %s: %s", type(message).__name__, error)
        return error.errno or zmq.EAGAIN
    return 0

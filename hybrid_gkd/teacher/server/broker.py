"""The broker: one thread that hands requests of clients to workers with a free credit.

It reads headers only and passes array frames on untouched; checksums are verified at both ends. What it
promises: a request is answered exactly once, by a result or by an error; a worker that dies, hangs or loses a
request costs time, not the request; no message, however malformed, ends the loop; a client that floods it or
does not read costs the others nothing but their place in the queue.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

import msgspec
import zmq

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher import network, protocol
from hybrid_gkd.teacher.keys import Keys
from hybrid_gkd.teacher.protocol import Reply, ScoreError, ScoreRequest, ScoreResult
from hybrid_gkd.teacher.server.ledger import Client, Ledger, Ticket, Worker
from hybrid_gkd.teacher.server.statistics import Statistics

log = logging.getLogger(__name__)

MAX_UNSENT_TO_CLIENT = 256
"""Messages that wait for one client to read them; it gets no more before it does."""
MAX_UNSENT_TO_WORKER = 2048
MAX_LOSSES = 3
"""After this many workers died on a request it is probably the cause; its client is told."""
CLIENT_SECONDS = 30.0
"""A client that was silent for this long is gone; nobody computes for it any more."""
HEDGE_SECONDS, HEDGE_FACTOR = 10.0, 4.0
"""A request that a live worker has held for this long, and for so many times the 99th percentile, is given to
another one as well: its engine may hang."""
MESSAGES_PER_TURN = 64
"""Read from one socket before the other gets its turn."""
POLL_MILLISECONDS = 200
FLUSH_MILLISECONDS = 2000
"""For the last answers to leave when the broker closes."""


class Broker:
    """Binds both ports on construction; `run` serves until its callback says stop.

    With `keys`, connections are encrypted and only clients and workers on the allow-list get in.

    Raises TeacherError when a port is taken, with the option that sets it.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 15555, worker_port: int = 15556, keys: Keys | None = None
    ):
        self.instance = uuid.uuid4().hex
        self._context = zmq.Context()
        self._authenticator = network.start_authenticator(self._context, keys) if keys else None
        self._ledger = Ledger()
        self._client_socket = self._context.socket(zmq.ROUTER)
        self._worker_socket = self._context.socket(zmq.ROUTER)
        try:
            self.port = network.bind(
                self._client_socket, host, port, "--port", keys=keys,
                max_message_bytes=protocol.MAX_REQUEST_BYTES, max_unsent=MAX_UNSENT_TO_CLIENT,
            )  # fmt: skip
            self.worker_port = network.bind(
                self._worker_socket, host, worker_port, "--worker-port", keys=keys,
                max_message_bytes=protocol.MAX_REPLY_BYTES, max_unsent=MAX_UNSENT_TO_WORKER,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        self._model: protocol.ModelInfo | None = None
        self._workers: dict[bytes, Worker] = {}
        self._ping_number = 0
        self._next_ping = 0.0
        self._last_turn = time.monotonic()
        self._draining = False
        self._statistics = Statistics(time.monotonic())
        self.counters = self._statistics.counters

    @property
    def num_workers(self) -> int:
        """Workers alive that have answered their test request."""
        return sum(worker.tested for worker in self._workers.values())

    @property
    def num_held(self) -> int:
        """Requests of clients that have no answer yet."""
        return sum(len(client.tickets) for client in self._ledger.clients.values())

    def num_delivered(self, worker_name: str) -> int:
        """Results of the live worker with this name."""
        return sum(worker.num_delivered for worker in self._workers.values() if worker.name == worker_name)

    def drain(self) -> None:
        """Take no new requests; those that are here are still answered."""
        self._draining = True

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        someone_reads = any(not client.blocked for client in self._ledger.clients.values())
        self._context.destroy(linger=FLUSH_MILLISECONDS if someone_reads else 0)

    def run(self, keep_running: Callable[[], bool]) -> None:
        """Serve; `keep_running` is asked several times a second."""
        poller = zmq.Poller()
        handlers = {self._client_socket: self._from_client, self._worker_socket: self._from_worker}
        for each in handlers:
            poller.register(each, zmq.POLLIN)
        while keep_running():
            for ready, _ in poller.poll(POLL_MILLISECONDS):
                self._read(ready, handlers[ready])
            now = time.monotonic()
            self._forgive_own_pause(now)
            if now >= self._next_ping:
                self._next_ping = now + protocol.PING_INTERVAL_SECONDS
                self._ping_workers()
                self._hedge(now)
                self._drop_silent_clients(now)
            self._drop_dead_workers()
            self._expire()
            self._dispatch()

    def _forgive_own_pause(self, now: float) -> None:
        """Nobody was silent while this process could not listen."""
        pause, self._last_turn = now - self._last_turn, now
        if pause > protocol.LIVENESS_SECONDS / 2:
            peers: list[Worker | Client] = [*self._workers.values(), *self._ledger.clients.values()]
            for peer in peers:
                peer.heard = now

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
            except protocol.ForeignVersion as error:
                # Whatever is sent carries this side's version; the other one reports it.
                self.counters["malformed"] += 1
                answer = self._welcome() if source is self._client_socket else protocol.Rejected(reason=str(error))
                _send(source, frames[0].bytes, answer)
            except protocol.ProtocolError as error:
                self.counters["malformed"] += 1
                log.debug("dropped a malformed message: %s", error)

    # Clients

    def _from_client(self, identity: bytes, message: protocol.AnyMessage, payload: list[zmq.Frame]) -> None:
        if isinstance(message, protocol.StatusRequest):
            _send(self._client_socket, identity, self.status())
            return
        client = self._ledger.clients.setdefault(identity, Client(heard=0.0))
        client.heard = time.monotonic()
        match message:
            case protocol.Hello():
                self._to_client(identity, self._welcome())
            case ScoreRequest():
                self._accept(identity, client, message, payload)
            case protocol.Ping():
                self._to_client(identity, protocol.Pong(
                    number=message.number, instance=self.instance, pending=list(client.tickets),
                    queue_length=len(self._ledger.queue), engine_busy=self._engine_busy(),
                ))  # fmt: skip
            case protocol.Bye():
                self._drop_client(identity)
            case _:
                raise protocol.ProtocolError(f"a client may not send {type(message).__name__}")

    def _welcome(self) -> protocol.Welcome:
        num_workers = 0 if self._draining else self.num_workers
        return protocol.Welcome(instance=self.instance, num_workers=num_workers, model=self._model)

    def _to_client(self, identity: bytes, message: protocol.AnyMessage, payload: list[zmq.Frame] | None = None) -> None:
        errno = _send(self._client_socket, identity, message, payload)
        client = self._ledger.clients.get(identity)
        if client is not None:
            client.blocked = errno == zmq.EAGAIN
        if errno and isinstance(message, ScoreResult | ScoreError):
            self.counters["undelivered"] += 1

    def _accept(self, identity: bytes, client: Client, request: ScoreRequest, payload: list[zmq.Frame]) -> None:
        known = client.tickets.get(request.id)
        if known is not None:
            # The client lost patience. The request keeps its place; a second worker may try it.
            known.request, known.deadline = request, time.monotonic() + request.timeout_seconds
            if known.worker is not None and self._has_free_worker(known):
                self._requeue(known)
            return
        busy = "the service is shutting down" if self._draining else None
        busy = busy or self._ledger.why_busy(client, sum(map(len, payload)))
        if busy is None:
            self._ledger.open(identity, request, payload)
        else:
            self.counters["refused"] += 1
            self._to_client(identity, ScoreError(id=request.id, attempt=request.attempt, code="busy", reason=busy))

    def _drop_client(self, identity: bytes) -> None:
        self.counters["abandoned"] += self._ledger.drop_client(identity)

    def _drop_silent_clients(self, now: float) -> None:
        for identity in [each for each, client in self._ledger.clients.items() if client.heard < now - CLIENT_SECONDS]:
            self._drop_client(identity)

    def _finish(self, ticket: Ticket, answer: Reply, payload: list[zmq.Frame]) -> None:
        """The one answer to the client."""
        self._ledger.close(ticket)
        if ticket.client:
            answer = msgspec.structs.replace(answer, id=ticket.request.id, attempt=ticket.request.attempt)
            self._to_client(ticket.client, answer, payload)

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
                    worker.engine_busy = message.engine_busy
                    self._recover_lost(identity, worker, message)
            case ScoreResult() | ScoreError():
                self._on_reply(identity, message, payload)
            case _:
                raise protocol.ProtocolError(f"a worker may not send {type(message).__name__}")

    def _register(self, identity: bytes, message: protocol.Register) -> None:
        reason = None
        if self._model is not None and message.model != self._model:
            reason = f"it serves {message.model}, this broker's clients were promised {self._model}"
        if reason:
            self._reject(identity, message.name, f"the broker turned the worker away: {reason}")
            return
        if identity in self._workers:  # it lives; the connection was lost, and perhaps messages with it
            self._drop_worker(identity, died=False)
        self._workers[identity] = Worker(
            name=message.name, model=message.model, credits=message.credits, heard=time.monotonic()
        )
        _send(self._worker_socket, identity, protocol.Registered())
        self._send_test_request(identity, message.model)

    def _reject(self, identity: bytes, name: str, reason: str) -> None:
        log.warning("worker %s: %s", name, reason)
        _send(self._worker_socket, identity, protocol.Rejected(reason=reason))

    def _send_test_request(self, identity: bytes, model: protocol.ModelInfo) -> None:
        request, array = protocol.make_test_request(model)
        self._send_ticket(self._ledger.open(b"", request, [zmq.Frame(array)]), identity)

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
            self._reject(identity, worker.name, f"the test request failed: {reason}")
            return
        self._model = worker.model
        worker.tested = True
        log.info("worker %s joined, %d alive", worker.name, self.num_workers)

    def _on_reply(self, identity: bytes, reply: Reply, payload: list[zmq.Frame]) -> None:
        worker, ticket = self._workers.get(identity), self._ledger.tickets.get(reply.id)
        if worker is not None:
            worker.held.discard(reply.id)
            worker.suspect = False
        if ticket is None or identity not in ticket.tried:
            self.counters["late"] += 1
            return
        self._finish(ticket, reply, payload)
        if not ticket.client:
            if worker is not None:
                self._judge_test(identity, worker, ticket, reply, payload)
        elif isinstance(reply, ScoreResult):
            self._statistics.add(ticket, sum(map(len, payload)), time.monotonic())
            if worker is not None:
                worker.num_delivered += 1
        else:
            self.counters["refused"] += 1

    def _ping_workers(self) -> None:
        self._ping_number += 1
        for identity, worker in list(self._workers.items()):
            errno = _send(self._worker_socket, identity, protocol.Ping(number=self._ping_number))
            if errno == zmq.EHOSTUNREACH:
                log.warning("worker %s: the connection is gone", worker.name)
                self._drop_worker(identity)

    def _hedge(self, now: float) -> None:
        """Give what a worker keeps for too long to another one as well; the first answer counts."""
        patience = max(HEDGE_SECONDS, HEDGE_FACTOR * self._statistics.longest_usual_service(now))
        for ticket in list(self._ledger.tickets.values()):
            if not ticket.client or ticket.worker is None or ticket.sent > now - patience:
                continue
            if self._has_free_worker(ticket):
                worker = self._workers[ticket.worker]
                worker.suspect = True
                log.warning("worker %s keeps a request for %.0f s, another one gets it", worker.name, now - ticket.sent)
                self.counters["hedged"] += 1
                self._requeue(ticket)

    def _has_free_worker(self, ticket: Ticket) -> bool:
        return any(worker.free > 0 and each not in ticket.tried for each, worker in self._workers.items())

    def _recover_lost(self, identity: bytes, worker: Worker, pong: protocol.Pong) -> None:
        """Queue again what the worker should hold but does not: its connection broke in between."""
        for ticket_id in worker.held.difference(pong.pending):
            ticket = self._ledger.tickets.get(ticket_id)
            if ticket is None:  # answered by another worker or expired; the credit was all that was left
                worker.held.discard(ticket_id)
            elif ticket.worker == identity and ticket.sent_at_ping < pong.number:
                worker.held.discard(ticket_id)
                self._requeue(ticket)

    def _drop_dead_workers(self) -> None:
        oldest = time.monotonic() - protocol.LIVENESS_SECONDS
        for identity in [identity for identity, worker in self._workers.items() if worker.heard < oldest]:
            name = self._workers[identity].name
            log.warning("worker %s was silent for %.0f s and counts as dead", name, protocol.LIVENESS_SECONDS)
            self._drop_worker(identity)

    def _drop_worker(self, identity: bytes, *, died: bool = True) -> None:
        for ticket_id in self._workers.pop(identity).held:
            ticket = self._ledger.tickets.get(ticket_id)
            if ticket is None or ticket.worker != identity:
                continue
            ticket.losses += died
            if not ticket.client or ticket.losses >= MAX_LOSSES:
                self._fail(ticket, "failed", f"{ticket.losses} workers died while they held the request")
            else:
                self._requeue(ticket)

    # Queue

    def _requeue(self, ticket: Ticket) -> None:
        self._ledger.requeue(ticket)
        self.counters["requeued"] += 1

    def _dispatch(self) -> None:
        """Give the oldest requests to the workers with the most free credits."""
        while (ticket := self._ledger.next_ticket()) is not None:
            free = {identity: worker.free for identity, worker in self._workers.items() if worker.free > 0}
            if not free:
                return
            self._ledger.queue.popleft()
            self._send_ticket(ticket, max(free, key=lambda each: (each not in ticket.tried, free[each])))

    def _send_ticket(self, ticket: Ticket, identity: bytes) -> None:
        ticket.worker, ticket.sent, ticket.sent_at_ping = identity, time.monotonic(), self._ping_number
        ticket.tried.add(identity)
        self._workers[identity].held.add(ticket.id)
        remaining = max(0.0, ticket.deadline - ticket.sent)
        request = msgspec.structs.replace(ticket.request, id=ticket.id, timeout_seconds=remaining)
        _send(self._worker_socket, identity, request, ticket.payload)

    def _expire(self) -> None:
        expired = self._ledger.expired(time.monotonic())
        for ticket in expired:
            self.counters["expired"] += 1
            where = "waiting for a worker" if ticket.worker is None else "at a worker"
            self._fail(ticket, "expired", f"the deadline passed while the request was {where}")
        if expired:
            self._ledger.tidy_queue()

    def _engine_busy(self) -> float:
        busy = [worker.engine_busy for worker in self._workers.values() if worker.tested]
        return sum(busy) / max(len(busy), 1)

    def status(self) -> protocol.Status:
        return self._statistics.status(
            time.monotonic(), model=self._model, num_workers=self.num_workers, engine_busy=self._engine_busy(),
            ledger=self._ledger, workers=list(self._workers.values()),
        )  # fmt: skip


def _send(
    target: zmq.Socket, identity: bytes, message: protocol.AnyMessage, payload: list[zmq.Frame] | None = None
) -> int:
    """0, or the error of zmq: EAGAIN for a peer that does not read, EHOSTUNREACH for one that is gone."""
    frames = [identity, *protocol.encode(message), *(payload or [])]
    try:
        target.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:  # pings and deadlines take care of the rest
        log.debug("could not send %s: %s", type(message).__name__, error)
        return error.errno or zmq.EAGAIN
    return 0

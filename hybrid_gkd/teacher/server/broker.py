"""The broker: one thread that assigns clients' requests to workers with a free credit, fairly by key (dispatch.py).

It forwards array frames unchanged, except those of requests that it cuts (parts.py), and validates a sample of each
result. Guarantees: every request is answered exactly once, by a result or an error. A worker that dies, hangs, loses a
request or returns invalid scores delays the request, but does not fail it. No malformed message ends the loop. A client
that floods the broker or does not read its replies delays other keys only within the limits of dispatch.py.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec
import zmq

from hybrid_gkd.errors import TeacherError, TeacherRefused
from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.keys import AllowList, Keys
from hybrid_gkd.teacher.protocol import AnyMessage, Reply, ScoreError, ScoreRequest, ScoreResult
from hybrid_gkd.teacher.server.dispatch import assignments, busy_reason
from hybrid_gkd.teacher.server.parts import cut_request, join_results
from hybrid_gkd.teacher.server.port import Port, start_authenticator
from hybrid_gkd.teacher.server.records import ClientRecord, KeyRecord, Ticket, WorkerRecord
from hybrid_gkd.teacher.server.statistics import Statistics

log = logging.getLogger(__name__)

MAX_UNSENT_TO_CLIENT = 256
"""Send queue of one client, in messages; further messages are dropped until the client reads."""
MAX_UNSENT_TO_WORKER = 2048
MAX_FAILURES = 3
"""Failed attempts (worker died, bad reply) after which a request fails, since it is probably the cause."""
MAX_BAD_REPLIES = 3
"""Bad replies of a worker, to requests that another worker answered well, after which it is excluded."""
MAX_CHECKED_VALUES = 1 << 18
"""Candidates of a result that the broker validates, which takes a few milliseconds; the client validates all."""
CLIENT_SECONDS = 30.0
"""Inactivity timeout of a client; its requests are dropped after that."""
HEDGE_SECONDS, HEDGE_FACTOR = 10.0, 4.0
"""A request is sent to a second worker (hedged) after this time and this multiple of the 99th percentile."""
POLL_MILLISECONDS = 200
FLUSH_MILLISECONDS = 2000
"""Time to send the last replies when the broker closes."""


class Broker:
    """Assigns requests to workers. The constructor binds both ports; raises TeacherError: a port is in use.

    With `keys`, connections are encrypted and restricted to the clients and workers on the allow-lists.
    """

    def __init__(self, *, host: str = "127.0.0.1", port: int, worker_port: int, keys: Keys | None = None):
        self.instance = uuid.uuid4().hex
        self._clients: dict[bytes, ClientRecord] = {}
        self._keys: WeakValueDictionary[str | bytes, KeyRecord] = WeakValueDictionary()
        self._workers: dict[bytes, WorkerRecord] = {}
        self._tickets: dict[str, Ticket] = {}
        """All open requests: not answered, and with a connected client."""
        self._queue: OrderedDict[str, Ticket] = OrderedDict()
        """Open requests without a worker."""
        self._held_bytes = 0
        self._context = zmq.Context()
        allowed = AllowList(keys) if keys else None
        self._authenticator = start_authenticator(self._context, allowed) if allowed else None
        try:
            self._client_port = Port(
                self._context, "clients", host, port, "--port", allowed=allowed,
                max_message_bytes=protocol.MAX_REQUEST_BYTES, max_unsent=MAX_UNSENT_TO_CLIENT,
            )
            self._worker_port = Port(
                self._context, "workers", host, worker_port, "--worker-port", allowed=allowed,
                max_message_bytes=protocol.MAX_REPLY_BYTES, max_unsent=MAX_UNSENT_TO_WORKER,
            )
        except BaseException:
            self.close()
            raise
        self.port, self.worker_port = self._client_port.number, self._worker_port.number
        self.model: protocol.ModelInfo | None = None
        """Model of the workers; None until the first worker has passed its test."""
        self._barred: deque[str] = deque(maxlen=16)
        """Excluded workers, with the reason."""
        self._ping_number = 0
        self._draining = False
        self._statistics = Statistics()
        self.counters = self._statistics.counters

    @property
    def num_workers(self) -> int:
        """Number of live workers that have passed their test."""
        return sum(worker.tested for worker in self._workers.values())

    @property
    def num_held(self) -> int:
        """Number of open requests."""
        return len(self._tickets)

    def num_delivered(self, worker_name: str) -> int:
        """Return the number of results from the live worker with this name."""
        return sum(worker.num_delivered for worker in self._workers.values() if worker.name == worker_name)

    def drain(self) -> None:
        """Refuse new requests; open ones are still answered."""
        self._draining = True

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        someone_reads = any(not client.blocked for client in self._clients.values())
        self._context.destroy(linger=FLUSH_MILLISECONDS if someone_reads else 0)

    def run(self, keep_running: Callable[[], bool]) -> None:
        """Serve until `keep_running`, which is called several times per second, returns False."""
        poller, next_ping, last_iteration = zmq.Poller(), 0.0, time.monotonic()
        handlers = {
            self._client_port.socket: (self._client_port, self._from_client),
            self._worker_port.socket: (self._worker_port, self._from_worker),
        }
        for each in handlers:
            poller.register(each, zmq.POLLIN)
        while keep_running():
            for ready, _ in poller.poll(POLL_MILLISECONDS):
                self._read(*handlers[ready])
            now = time.monotonic()
            if now - last_iteration > protocol.LIVENESS_SECONDS / 2:  # after a pause, restart the peers' timeouts
                peers: list[WorkerRecord | ClientRecord] = [*self._workers.values(), *self._clients.values()]
                for peer in peers:
                    peer.heard = now
            last_iteration = now
            if now >= next_ping:
                next_ping = now + protocol.PING_INTERVAL_SECONDS
                self._check_workers(now)
                for port, _ in handlers.values():
                    port.check_unfinished()
            self._time_out()
            self._dispatch()

    def _read(self, port: Port, handle: Callable[[bytes, str | None, AnyMessage, list[zmq.Frame]], None]) -> None:
        for identity, key, frames in port.receive():
            try:
                if not frames:
                    raise protocol.ProtocolError("no header, or too many frames")
                message = protocol.decode_header(frames[0].buffer)
                if not identity.startswith(b"\0"):  # the prefix of ids that the socket assigns
                    rejected = protocol.Rejected(reason="the service assigns routing ids itself: set no ROUTING_ID")
                    port.send(identity, rejected)
                    raise protocol.ProtocolError(rejected.reason)
                handle(identity, key, message, frames[1:])
            except protocol.ProtocolError as error:
                self.counters["malformed"] += 1
                log.debug("dropped a malformed message: %s", error)
                if isinstance(error, protocol.ForeignVersion):  # reply, so that the peer sees and reports our version
                    rejected = protocol.Rejected(reason=str(error))
                    port.send(identity, self._welcome() if port is self._client_port else rejected)

    # Clients

    def _from_client(self, identity: bytes, key: str | None, message: AnyMessage, payload: list[zmq.Frame]) -> None:
        if isinstance(message, protocol.StatusRequest):
            self._client_port.send(identity, self.status())
            return
        if (client := self._clients.get(identity)) is None:
            client = ClientRecord(identity, self._keys.setdefault(key or identity, KeyRecord()))
            self._clients[identity] = client
        client.heard = time.monotonic()
        match message:
            case protocol.Hello():
                self._to_client(client, self._welcome())
            case ScoreRequest():
                self._accept(client, message, payload)
            case protocol.Ping():
                self._to_client(client, protocol.Pong(
                    number=message.number, instance=self.instance,
                    pending=list(dict.fromkeys(each.request.id for each in client.tickets.values())),
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
        errno = self._client_port.send(client.identity, message, payload)
        client.blocked = errno == zmq.EAGAIN
        if errno == zmq.EHOSTUNREACH:
            client.heard = -math.inf  # disconnected; a reconnection gets another routing id
        if errno and isinstance(message, ScoreResult | ScoreError):
            self.counters["undelivered"] += 1

    def _accept(self, client: ClientRecord, request: ScoreRequest, payload: list[zmq.Frame]) -> None:
        now, num_bytes = time.monotonic(), sum(map(len, payload))
        deadline = now + request.timeout_seconds
        if known := [each for each in client.tickets.values() if each.request.id == request.id]:
            for ticket in known:
                # A repeated request keeps its place; a second worker may try it.
                ticket.request = msgspec.structs.replace(ticket.request, attempt=request.attempt)
                ticket.deadline = deadline
                if ticket.worker is not None and self._has_free_worker(ticket):
                    self._requeue(ticket)
        elif self._draining:
            self._refuse(client, request, "busy", "the service is shutting down")
        elif busy := busy_reason(client, num_bytes, num_held=self.num_held, held_bytes=self._held_bytes):
            self._refuse(client, request, "busy", busy)
        else:
            try:
                messages = cut_request(request, payload)
            except TeacherError as error:
                self._refuse(client, request, "refused" if isinstance(error, TeacherRefused) else "failed", str(error))
                return
            parts = [Ticket(uuid.uuid4().hex, client, *each, now, deadline) for each in messages]
            self._held_bytes += num_bytes
            for ticket in parts:
                ticket.parts = parts if len(parts) > 1 else []
                client.tickets[ticket.id] = self._tickets[ticket.id] = self._queue[ticket.id] = ticket

    def _refuse(self, client: ClientRecord, request: ScoreRequest, code: str, reason: str) -> None:
        self.counters["refused"] += 1
        self._to_client(client, ScoreError(id=request.id, attempt=request.attempt, code=code, reason=reason))

    def _drop_client(self, client: ClientRecord) -> None:
        self.counters["abandoned"] += len(client.tickets)
        for ticket in list(client.tickets.values()):
            self._close(ticket)
        del self._clients[client.identity]

    def _close(self, ticket: Ticket) -> None:
        """Remove an open request; a later reply to it counts as late."""
        del self._tickets[ticket.id]
        del ticket.client.tickets[ticket.id]
        self._queue.pop(ticket.id, None)
        self._held_bytes -= ticket.num_bytes

    def _finish(self, ticket: Ticket, answer: Reply, payload: list[zmq.Frame]) -> None:
        """Close a request and send its only reply: for a request in parts the joined results, or the first error."""
        self._close(ticket)
        if ticket.parts and isinstance(answer, ScoreResult):
            ticket.result = answer, payload
            results = [each.result for each in ticket.parts if each.result is not None]
            if len(results) < len(ticket.parts):
                return
            answer, payload = join_results(results)
        for other in ticket.parts:
            if other.id in self._tickets:
                self._close(other)
        answer = msgspec.structs.replace(answer, id=ticket.request.id, attempt=ticket.request.attempt)
        self._to_client(ticket.client, answer, payload)

    def _fail(self, ticket: Ticket, code: str, reason: str) -> None:
        if ticket.id in self._tickets:  # else closed with another part of its request
            self._finish(ticket, ScoreError(id=ticket.id, attempt=0, code=code, reason=reason), [])

    # Workers

    def _from_worker(self, identity: bytes, _: str | None, message: AnyMessage, payload: list[zmq.Frame]) -> None:
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
        if self.model is not None and self.model != message.model:
            reason = f"it serves {message.model}, not this service's model: {message.model.differences(self.model)}"
            self._reject(identity, message.name, f"the broker rejected the worker: {reason}")
            return
        if identity in self._workers:  # alive, but the connection was lost, and perhaps messages with it
            self._drop_worker(self._workers[identity], died=False)
        self._workers[identity] = WorkerRecord(identity, message, heard=time.monotonic())
        self._worker_port.send(identity, protocol.Registered())
        self._worker_port.send(identity, *protocol.make_test_request(message.model))

    def _reject(self, identity: bytes, name: str, reason: str) -> None:
        log.warning("worker %s: %s", name, reason)
        self._worker_port.send(identity, protocol.Rejected(reason=reason))

    def _check_test_reply(self, worker: WorkerRecord, reply: Reply, frames: list[zmq.Frame]) -> None:
        """Accept a worker if its reply to the test request passes a client's validation; otherwise reject it."""
        model = worker.registration.model
        try:
            if isinstance(reply, ScoreError):
                raise TeacherError(reply.reason)
            if self.model is not None and self.model != model:
                raise TeacherError(f"another worker registered first: {model.differences(self.model)}")
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
                self._check_test_reply(worker, reply, payload)
                return
            worker.held.discard(reply.id)
            worker.suspect = False
        if ticket is None or identity not in ticket.tried:
            self.counters["late"] += 1
        elif problem := self._problem(reply, payload, ticket):
            self.counters["bad_replies"] += 1
            log.warning("bad reply: %s", problem)
            if worker is not None:
                ticket.bad_replies.append((worker, problem))
            if ticket.worker is worker:
                self._retry_or_fail(ticket, f"the reply was bad: {problem}")
        else:
            self._finish(ticket, reply, payload)
            if isinstance(reply, ScoreError):
                self.counters["refused"] += 1
                return
            self._statistics.add(ticket, sum(map(len, payload)))
            if worker is not None:
                worker.num_delivered += 1
            for other, problem in ticket.bad_replies:
                if other is not worker:  # otherwise the request itself may be the cause
                    self._count_bad_reply(other, problem)

    def _problem(self, reply: Reply, payload: list[zmq.Frame], ticket: Ticket) -> str:
        """Return the error in a reply, as far as a sample of its rows shows; "" if there is none."""
        assert self.model is not None
        if isinstance(reply, ScoreResult):
            try:
                protocol.check_result(
                    reply, [frame.buffer for frame in payload], topk=ticket.request.topk,
                    vocab_size=self.model.num_embeddings, num_rows=ticket.request.num_scored,
                    max_values=MAX_CHECKED_VALUES,
                )
            except TeacherError as error:
                return str(error)
        return ""

    def _count_bad_reply(self, worker: WorkerRecord, problem: str) -> None:
        worker.num_bad += 1
        if worker.num_bad == MAX_BAD_REPLIES and self._workers.get(worker.identity) is worker:
            reason = f"excluded after {worker.num_bad} bad replies, the last: {problem}"
            self._barred.append(f"{worker.name}: {reason}")
            self._drop_worker(worker, died=False)
            self._reject(worker.identity, worker.name, reason)

    def _check_workers(self, now: float) -> None:
        """Ping the workers. Send a request that one holds for too long to another one as well; the first reply wins."""
        self._ping_number += 1
        ping = protocol.Ping(number=self._ping_number)
        for worker in list(self._workers.values()):
            if self._worker_port.send(worker.identity, ping) == zmq.EHOSTUNREACH:
                log.warning("worker %s: connection lost", worker.name)
                self._drop_worker(worker)
        timeout = max(HEDGE_SECONDS, HEDGE_FACTOR * self._statistics.service_time_p99())
        for ticket in self._tickets.values():
            if ticket.worker is not None and ticket.sent <= now - timeout and self._has_free_worker(ticket):
                ticket.worker.suspect = True
                seconds = now - ticket.sent
                log.warning("worker %s: no reply for %.0f s, request sent to another one", ticket.worker.name, seconds)
                self.counters["hedged"] += 1
                self._requeue(ticket)

    def _has_free_worker(self, ticket: Ticket) -> bool:
        return any(worker.free > 0 and worker.identity not in ticket.tried for worker in self._workers.values())

    def _recover_lost(self, worker: WorkerRecord, pong: protocol.Pong) -> None:
        """Requeue requests that the worker should hold but does not, because its connection broke."""
        for ticket_id in worker.held.difference(pong.pending):
            ticket = self._tickets.get(ticket_id)
            if ticket is None:  # answered by another worker or expired: free the credit
                worker.held.discard(ticket_id)
            elif ticket.worker is worker and ticket.sent_at_ping < pong.number:
                worker.held.discard(ticket_id)
                self._requeue(ticket)

    def _time_out(self) -> None:
        """Drop inactive clients, silent workers and requests after their deadline."""
        now = time.monotonic()
        for client in list(self._clients.values()):
            if client.heard < now - CLIENT_SECONDS:
                self._drop_client(client)
        for worker in list(self._workers.values()):
            if worker.heard < now - protocol.LIVENESS_SECONDS:
                log.warning("worker %s: no message for %g s, dropped", worker.name, protocol.LIVENESS_SECONDS)
                self._drop_worker(worker)
        for ticket in [each for each in self._tickets.values() if each.deadline <= now]:
            self.counters["expired"] += 1
            where = "waiting for a worker" if ticket.worker is None else "at a worker"
            self._fail(ticket, "expired", f"the client's request_timeout passed while the request was {where}")

    def _drop_worker(self, worker: WorkerRecord, *, died: bool = True) -> None:
        del self._workers[worker.identity]
        for ticket in [each for each in self._tickets.values() if each.worker is worker]:
            self._retry_or_fail(ticket, "the worker died" if died else None)

    def _retry_or_fail(self, ticket: Ticket, failure: str | None) -> None:
        """Requeue a request, or fail it after too many failures, unless it was closed with another part."""
        if ticket.id not in self._tickets:
            return
        ticket.num_failures += failure is not None
        if failure and ticket.num_failures >= MAX_FAILURES:
            self._fail(ticket, "failed", f"{ticket.num_failures} attempts to score it failed; at the last, {failure}")
        else:
            self._requeue(ticket)

    def _requeue(self, ticket: Ticket) -> None:
        """Put a request at the head of the queue."""
        ticket.worker = None
        self._queue[ticket.id] = ticket
        self._queue.move_to_end(ticket.id, last=False)
        self.counters["requeued"] += 1

    def _dispatch(self) -> None:
        """Assign queued requests to workers with free credits."""
        if not self._queue:
            return
        for ticket, worker in assignments(self._queue.values(), self._workers.values()):
            del self._queue[ticket.id]
            ticket.worker, ticket.sent, ticket.sent_at_ping = worker, time.monotonic(), self._ping_number
            worker.last_assigned = ticket.sent
            ticket.tried.add(worker.identity)
            worker.held.add(ticket.id)
            remaining = max(0.0, ticket.deadline - ticket.sent)
            request = msgspec.structs.replace(ticket.request, id=ticket.id, timeout_seconds=remaining)
            self._worker_port.send(worker.identity, request, ticket.payload)

    def _engine_busy(self) -> float:
        busy = [worker.engine_busy for worker in self._workers.values() if worker.tested]
        return sum(busy) / max(len(busy), 1)

    def status(self) -> protocol.Status:
        queue_length, workers = len(self._queue), [each.status() for each in self._workers.values()]
        return protocol.Status(
            model=self.model, num_workers=self.num_workers, queue_length=queue_length,
            num_in_flight=self.num_held - queue_length, engine_busy=self._engine_busy(), workers=workers,
            barred=list(self._barred), **self._statistics.figures(),
        )

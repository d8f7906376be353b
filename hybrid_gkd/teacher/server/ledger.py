"""The requests that a broker holds, their clients and the workers. It knows nothing of sockets."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field

import zmq

from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.protocol import ScoreRequest

MAX_HELD_REQUESTS = 4096
MAX_HELD_BYTES = 1 << 30
MAX_HELD_PER_CLIENT = 256


@dataclass(eq=False)
class Ticket:
    """A request from its arrival to its one answer. Workers know it by `id`, the client by `request.id`."""

    id: str
    client: ClientRecord
    request: ScoreRequest
    payload: list[zmq.Frame]
    num_bytes: int
    arrived: float
    deadline: float
    worker: WorkerRecord | None = None
    """None while the ticket is in the queue."""
    sent: float = 0.0
    sent_at_ping: int = 0
    tried: set[bytes] = field(default_factory=set)
    """Routing ids of workers that it was sent to."""
    worker_deaths: int = 0


@dataclass(eq=False)
class ClientRecord:
    identity: bytes
    """Routing id."""
    heard: float
    """Monotonic time of the last message."""
    tickets: dict[str, Ticket] = field(default_factory=dict)
    """By the client's own ids."""
    blocked: bool = False
    """The last message could not be queued any more: the client does not read."""


@dataclass(eq=False)
class WorkerRecord:
    identity: bytes
    registration: protocol.Register
    heard: float
    held: set[str] = field(default_factory=set)
    """Tickets that occupy a credit."""
    tested: bool = False
    suspect: bool = False
    """It keeps a request much longer than usual; it gets no more before it answers something."""
    num_delivered: int = 0
    engine_busy: float = 0.0

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def free(self) -> int:
        return self.registration.credits - len(self.held) if self.tested and not self.suspect else 0


class Ledger:
    """Every ticket is here until it is answered or its client is gone; those without a worker are in the queue."""

    def __init__(self) -> None:
        self.clients: dict[bytes, ClientRecord] = {}
        self.tickets: dict[str, Ticket] = {}
        self.queue: OrderedDict[str, Ticket] = OrderedDict()
        self._held_bytes = 0

    def open(self, client: ClientRecord, request: ScoreRequest, payload: list[zmq.Frame]) -> str | None:
        """Queue a request; None, or the limit that it would exceed."""
        now, num_bytes = time.monotonic(), sum(map(len, payload))
        if client.blocked:
            return "the client does not read its replies"
        if len(client.tickets) >= MAX_HELD_PER_CLIENT:
            return f"{len(client.tickets)} requests of this client are here, the limit is {MAX_HELD_PER_CLIENT}"
        if num_bytes > protocol.MAX_REQUEST_BYTES:
            return f"the request has {num_bytes} bytes, the limit is {protocol.MAX_REQUEST_BYTES}"
        if len(self.tickets) >= MAX_HELD_REQUESTS or self._held_bytes + num_bytes > MAX_HELD_BYTES:
            return f"the queue is full ({len(self.tickets)} requests, {self._held_bytes} bytes)"
        ticket = Ticket(uuid.uuid4().hex, client, request, payload, num_bytes, now, now + request.timeout_seconds)
        self._held_bytes += num_bytes
        client.tickets[request.id] = self.tickets[ticket.id] = self.queue[ticket.id] = ticket
        return None

    def close(self, ticket: Ticket) -> None:
        """Forget the ticket; a later answer counts as late."""
        del self.tickets[ticket.id]
        del ticket.client.tickets[ticket.request.id]
        self.queue.pop(ticket.id, None)
        self._held_bytes -= ticket.num_bytes

    def requeue(self, ticket: Ticket) -> None:
        """To the head of the queue."""
        ticket.worker = None
        self.queue[ticket.id] = ticket
        self.queue.move_to_end(ticket.id, last=False)

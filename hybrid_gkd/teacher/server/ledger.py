"""The requests that a broker holds: who asked, who computes, and what waits. It knows nothing of sockets."""

from __future__ import annotations

import time
import uuid
from collections import deque
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
    client: bytes
    """Routing id; empty for the test request that every new worker has to pass."""
    request: ScoreRequest
    payload: list[zmq.Frame]
    num_bytes: int
    arrived: float
    deadline: float
    worker: bytes | None = None
    sent: float = 0.0
    sent_at_ping: int = 0
    tried: set[bytes] = field(default_factory=set)
    losses: int = 0


@dataclass(eq=False)
class Client:
    heard: float
    tickets: dict[str, Ticket] = field(default_factory=dict)
    """By the client's own ids."""
    blocked: bool = False
    """It did not read what was sent to it: the last message could not be queued any more."""


@dataclass(eq=False)
class Worker:
    name: str
    model: protocol.ModelInfo
    credits: int
    heard: float
    """Monotonic time of the last message."""
    held: set[str] = field(default_factory=set)
    """Tickets that occupy a credit."""
    tested: bool = False
    suspect: bool = False
    """It keeps a request much longer than usual; it gets no more before it answers something."""
    num_delivered: int = 0
    engine_busy: float = 0.0

    @property
    def free(self) -> int:
        return self.credits - len(self.held) if self.tested and not self.suspect else 0


class Ledger:
    """Every ticket is here until it is answered or its client is gone; those without a worker are in the queue."""

    def __init__(self) -> None:
        self.clients: dict[bytes, Client] = {}
        self.tickets: dict[str, Ticket] = {}
        self.queue: deque[Ticket] = deque()
        """May hold tickets that have been closed meanwhile."""
        self._name = uuid.uuid4().hex
        self._held_bytes = 0
        self._num_opened = 0

    def why_busy(self, client: Client, num_bytes: int) -> str | None:
        """The limit that a request of this size would exceed."""
        if client.blocked:
            return "the client does not read its replies"
        if len(client.tickets) >= MAX_HELD_PER_CLIENT:
            return f"{len(client.tickets)} requests of this client are here, the limit is {MAX_HELD_PER_CLIENT}"
        if num_bytes > protocol.MAX_REQUEST_BYTES:
            return f"the request has {num_bytes} bytes, the limit is {protocol.MAX_REQUEST_BYTES}"
        if len(self.tickets) >= MAX_HELD_REQUESTS or self._held_bytes + num_bytes > MAX_HELD_BYTES:
            return f"the queue is full ({len(self.tickets)} requests, {self._held_bytes} bytes)"
        return None

    def open(self, client: bytes, request: ScoreRequest, payload: list[zmq.Frame]) -> Ticket:
        """A new ticket; that of a client waits in the queue."""
        self._num_opened += 1
        now = time.monotonic()
        ticket = Ticket(
            id=f"{self._name}-{self._num_opened}", client=client, request=request, payload=payload,
            num_bytes=sum(map(len, payload)), arrived=now, deadline=now + request.timeout_seconds,
        )  # fmt: skip
        self.tickets[ticket.id] = ticket
        self._held_bytes += ticket.num_bytes
        if client:
            self.clients[client].tickets[request.id] = ticket
            self.queue.append(ticket)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Forget the ticket: whatever still comes for it is late."""
        del self.tickets[ticket.id]
        self._held_bytes -= ticket.num_bytes
        if ticket.client:
            del self.clients[ticket.client].tickets[ticket.request.id]

    def requeue(self, ticket: Ticket) -> None:
        ticket.worker = None
        self.queue.appendleft(ticket)

    def drop_client(self, identity: bytes) -> int:
        """Returns how many requests nobody waits for any more."""
        tickets = list(self.clients[identity].tickets.values())
        for ticket in tickets:
            self.close(ticket)
        del self.clients[identity]
        self.tidy_queue()
        return len(tickets)

    def next_ticket(self) -> Ticket | None:
        """The one at the head of the queue, which stays there."""
        while self.queue and self.queue[0].id not in self.tickets:
            self.queue.popleft()
        return self.queue[0] if self.queue else None

    def expired(self, now: float) -> list[Ticket]:
        return [ticket for ticket in self.tickets.values() if ticket.deadline <= now]

    def tidy_queue(self) -> None:
        """Closed tickets must not pile up behind one that waits."""
        self.queue = deque(ticket for ticket in self.queue if ticket.id in self.tickets)

"""The broker's records of requests, clients and workers."""

from __future__ import annotations

import functools
import time
import weakref
from dataclasses import dataclass, field

import zmq

from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.protocol import ScoreRequest, ScoreResult


@dataclass(eq=False)
class Ticket:
    """An open request. Its id is `id` towards workers and `request.id` towards the client."""

    id: str
    client: ClientRecord
    request: ScoreRequest
    payload: list[zmq.Frame]
    arrived: float
    deadline: float
    worker: WorkerRecord | None = None
    """Worker that the request is assigned to; None while it is queued."""
    sent: float = 0.0
    sent_at_ping: int = 0
    tried: set[bytes] = field(default_factory=set)
    """Routing ids of the workers that it was sent to."""
    num_failures: int = 0
    """Number of failed attempts: the worker died, or its reply was bad."""
    bad_replies: list[tuple[WorkerRecord, str]] = field(default_factory=list)
    """Workers with bad replies, and the errors."""
    parts: list[Ticket] = field(default_factory=list)
    """All parts of the request, in order, if this is one of several; each has the client's id."""
    result: tuple[ScoreResult, list[zmq.Frame]] | None = None
    """Scores of this part, until all parts have theirs."""

    @functools.cached_property
    def num_tokens(self) -> int:
        """Sum of L over the readings."""
        return self.request.num_tokens

    @functools.cached_property
    def num_bytes(self) -> int:
        return sum(map(len, self.payload))


@dataclass(eq=False)
class KeyRecord:
    """A client's key; without keys each connection counts as one."""

    clients: weakref.WeakSet[ClientRecord] = field(default_factory=weakref.WeakSet)
    """Its connections."""

    def held(self) -> tuple[int, int]:
        """Return the number of open requests of all connections, and their bytes."""
        tickets = [ticket for each in self.clients for ticket in each.tickets.values()]
        return len(tickets), sum(each.num_bytes for each in tickets)

    def tokens_at(self, worker: WorkerRecord | None = None) -> int:
        """Return the tokens of the requests of all connections at a worker; None: at all workers."""
        return sum(each.tokens_at(worker) for each in self.clients)


@dataclass(eq=False)
class ClientRecord:
    """A connection of a client."""

    identity: bytes
    """Routing id."""
    key: KeyRecord
    heard: float = 0.0
    """Monotonic time of the last message."""
    tickets: dict[str, Ticket] = field(default_factory=dict)
    """Open requests, or parts of them, by the broker's ids."""
    blocked: bool = False
    """Whether the last message could not be queued because the client does not read."""

    def __post_init__(self) -> None:
        self.key.clients.add(self)

    def tokens_at(self, worker: WorkerRecord | None = None) -> int:
        """Return the tokens of this client's requests at a worker; None: at all workers."""
        at_work = (each for each in self.tickets.values() if each.worker is not None)
        return sum(each.num_tokens for each in at_work if worker in (None, each.worker))


@dataclass(eq=False)
class WorkerRecord:
    identity: bytes
    registration: protocol.Register
    heard: float
    held: set[str] = field(default_factory=set)
    """Tickets that occupy a credit."""
    tested: bool = False
    suspect: bool = False
    """Whether it holds a request much longer than usual; it gets no new ones until it replies."""
    last_assigned: float = 0.0
    """Monotonic time of the last assigned request."""
    num_delivered: int = 0
    num_bad: int = 0
    """Number of bad replies to requests that another worker answered well."""
    engine_busy: float = 0.0

    @property
    def name(self) -> str:
        return self.registration.name

    def status(self) -> protocol.WorkerStatus:
        return protocol.WorkerStatus(
            name=self.name, ready=self.tested, num_held=len(self.held), num_delivered=self.num_delivered,
            num_bad=self.num_bad, engine_busy=self.engine_busy, silent_seconds=time.monotonic() - self.heard,
        )

    @property
    def free(self) -> int:
        return self.registration.credits - len(self.held) if self.tested and not self.suspect else 0

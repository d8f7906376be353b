"""The broker's records of requests, clients and workers."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.protocol import ScoreRequest


@dataclass(eq=False)
class Ticket:
    """A request from its arrival to its one answer. Workers know it by `id`, the client by `request.id`."""

    id: str
    client: ClientRecord
    request: ScoreRequest
    payload: list[zmq.Frame]
    arrived: float
    deadline: float
    worker: WorkerRecord | None = None
    """None while the ticket is in the queue."""
    sent: float = 0.0
    sent_at_ping: int = 0
    tried: set[bytes] = field(default_factory=set)
    """Routing ids of workers that it was sent to."""
    num_failures: int = 0
    """How often a worker died that held it, or answered it badly."""
    bad_replies: list[tuple[WorkerRecord, str]] = field(default_factory=list)
    """Who answered it badly, and how."""


@dataclass(eq=False)
class ClientRecord:
    identity: bytes
    """Routing id."""
    heard: float = 0.0
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
    turn: float = 0.0
    """When it last got a request; the one that waits longest is next."""
    num_delivered: int = 0
    num_bad: int = 0
    """Replies that no client could have used, to requests that another worker answered well."""
    engine_busy: float = 0.0

    @property
    def name(self) -> str:
        return self.registration.name

    @property
    def free(self) -> int:
        return self.registration.credits - len(self.held) if self.tested and not self.suspect else 0

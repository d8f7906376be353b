"""Fair scheduling of the broker's requests over workers.

The key with the fewest tokens at workers is served next; of its connections, the one with the fewest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from hybrid_gkd.teacher.protocol import MAX_REQUEST_BYTES
from hybrid_gkd.teacher.server.records import ClientRecord, Ticket, WorkerRecord

MAX_TOKENS_AT_WORKER = 1 << 17
"""Largest number of tokens of one key's requests at a worker, since other keys wait for them; a single request may
have more. It is 8 of our client's largest requests, or 3 s of work of a 7B model on one GPU."""

MAX_HELD_REQUESTS, MAX_HELD_PER_CONNECTION, MAX_HELD_BYTES = 4096, 256, 1 << 30
"""Limits of the broker's open requests. A key may hold at most half of what the other keys leave."""


def busy_reason(client: ClientRecord, num_bytes: int, *, num_held: int, held_bytes: int) -> str | None:
    """Return why a request of this size cannot be accepted at present; None if it can."""
    if client.blocked:
        return "the client does not read its replies"
    if len(client.tickets) >= MAX_HELD_PER_CONNECTION:
        return f"{len(client.tickets)} requests of this client are open, the limit is {MAX_HELD_PER_CONNECTION}"
    if num_bytes > MAX_REQUEST_BYTES:
        return f"the request has {num_bytes} bytes, the limit is {MAX_REQUEST_BYTES}"
    own, own_bytes = client.key.held()
    if own >= MAX_HELD_REQUESTS - num_held or own_bytes + num_bytes > MAX_HELD_BYTES - held_bytes:
        all_held = f"{num_held} requests, {held_bytes} bytes"
        return f"the queue is full ({all_held}), or the client's key holds half of what other keys leave"
    return None


def assignments(queue: Collection[Ticket], workers: Collection[WorkerRecord]) -> Iterator[tuple[Ticket, WorkerRecord]]:
    """Yield requests, in fair order, each with a free worker; the caller assigns each before it takes the next."""
    if not any(worker.free > 0 for worker in workers):
        return
    waiting: dict[ClientRecord, deque[Ticket]] = {}
    for ticket in queue:
        waiting.setdefault(ticket.client, deque()).append(ticket)
    while waiting and any(worker.free > 0 for worker in workers):
        key = min({client.key for client in waiting}, key=lambda each: each.tokens_at())
        client = min((each for each in waiting if each.key is key), key=lambda each: each.tokens_at())
        ticket = waiting[client].popleft()
        if not waiting[client]:
            del waiting[client]
        if (worker := choose_worker(ticket, workers)) is not None:
            yield ticket, worker


def choose_worker(ticket: Ticket, workers: Collection[WorkerRecord]) -> WorkerRecord | None:
    """Return a free worker for a request, the least recently used first; None if it has to wait."""
    free = [worker for worker in workers if worker.free > 0]
    bad = {worker.identity for worker, _ in ticket.bad_replies}
    if any(worker.tested and worker.identity not in bad for worker in workers):
        free = [worker for worker in free if worker.identity not in bad]  # wait for one that has not failed
    most = MAX_TOKENS_AT_WORKER - ticket.num_tokens
    free = [worker for worker in free if (there := ticket.client.key.tokens_at(worker)) == 0 or there <= most]
    return min(free, key=lambda each: (each.identity in ticket.tried, each.last_assigned), default=None)

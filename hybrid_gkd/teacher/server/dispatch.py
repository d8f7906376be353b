"""Order in which the broker assigns requests to workers: clients take turns, by the tokens that they have there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from hybrid_gkd.teacher.server.records import ClientRecord, Ticket, WorkerRecord

MAX_TOKENS_AT_WORKER = 1 << 17
"""Tokens of a client at one worker, which others wait for, unless a single request has more: 8 of our client's largest
requests, 3 s of a 7B model's work on one GPU."""


def assignments(
    queue: Collection[Ticket], workers: Collection[WorkerRecord]
) -> Iterator[tuple[Ticket, WorkerRecord]]:
    """Yield requests with a free worker; the caller assigns each before it takes the next.

    The next one is the oldest of the client with the fewest tokens at workers.
    """
    if not any(worker.free > 0 for worker in workers):
        return
    waiting: dict[ClientRecord, deque[Ticket]] = {}
    for ticket in queue:
        waiting.setdefault(ticket.client, deque()).append(ticket)
    while waiting and any(worker.free > 0 for worker in workers):
        client = min(waiting, key=lambda each: each.tokens_at())
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
        free = [worker for worker in free if worker.identity not in bad]  # else wait for one that has not failed
    most = MAX_TOKENS_AT_WORKER - ticket.num_tokens
    free = [worker for worker in free if (there := ticket.client.tokens_at(worker)) == 0 or there <= most]
    return min(free, key=lambda each: (each.identity in ticket.tried, each.last_assigned), default=None)

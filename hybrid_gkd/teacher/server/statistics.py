"""What the broker counts of the requests that it answered."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from hybrid_gkd.teacher import protocol
from hybrid_gkd.teacher.server.ledger import Ledger, Ticket, Worker

RATE_SECONDS = 10.0
WINDOW_SECONDS = 60.0
MAX_SAMPLES = 4096
COUNTERS = (
    "delivered", "tokens", "refused", "requeued", "hedged", "expired", "abandoned", "undelivered", "late", "malformed"
)  # fmt: skip
"""delivered: results sent. refused: errors sent. requeued: given to another worker. hedged: those of them that a
silent engine still holds. expired: deadline passed. abandoned: the client went away. undelivered: the client did not
read, or was gone. late: answers that nobody waited for any more. malformed: messages that were none."""


class Sample(NamedTuple):
    """One delivered result."""

    time: float
    tokens: int
    """Prompt and response."""
    response_tokens: int
    latency: float
    """Seconds from the arrival of the request."""
    service: float
    """Seconds from its last sending to a worker."""
    num_bytes: int


class Statistics:
    def __init__(self, now: float):
        self.started = now
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def add(self, ticket: Ticket, num_bytes: int, now: float) -> None:
        """A result of `num_bytes` was sent."""
        request = ticket.request
        self.counters["delivered"] += 1
        self.counters["tokens"] += request.num_tokens
        self._samples.append(
            Sample(
                time=now, tokens=request.num_tokens, response_tokens=sum(request.response_lengths),
                latency=now - ticket.arrived, service=now - ticket.sent, num_bytes=num_bytes,
            )
        )  # fmt: skip

    def _recent(self, now: float) -> deque[Sample]:
        while self._samples and self._samples[0].time < now - WINDOW_SECONDS:
            self._samples.popleft()
        return self._samples

    def tokens_per_second(self, now: float) -> float:
        """Over the last ten seconds, or since the start if that is less; over less where requests are very many."""
        samples = self._recent(now)
        start = max(now - RATE_SECONDS, self.started)
        if len(samples) == MAX_SAMPLES:
            start = max(start, samples[0].time)
        return sum(each.tokens for each in samples if each.time >= start) / max(now - start, 1.0)

    def latency_seconds(self, now: float) -> dict[str, float]:
        samples = self._recent(now)
        if not samples:
            return {}
        p50, p95, p99 = np.percentile([each.latency for each in samples], (50, 95, 99))
        return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}

    def longest_usual_service(self, now: float) -> float:
        """99th percentile of the seconds that a worker takes; 0 while nothing is known."""
        samples = self._recent(now)
        return float(np.percentile([each.service for each in samples], 99)) if samples else 0.0

    def bytes_per_token(self, now: float) -> float:
        samples = self._recent(now)
        return sum(each.num_bytes for each in samples) / max(sum(each.response_tokens for each in samples), 1)

    def status(
        self, now: float, *, model: protocol.ModelInfo | None, num_workers: int, engine_busy: float, ledger: Ledger,
        workers: list[Worker],
    ) -> protocol.Status:  # fmt: skip
        """All of it, with the state of the moment."""
        in_flight = sum(ticket.worker is not None for ticket in ledger.tickets.values())
        return protocol.Status(
            model=model,
            num_workers=num_workers,
            queue_length=len(ledger.tickets) - in_flight,
            num_in_flight=in_flight,
            tokens_per_second=self.tokens_per_second(now),
            latency_seconds=self.latency_seconds(now),
            bytes_per_token=self.bytes_per_token(now),
            engine_busy=engine_busy,
            uptime_seconds=now - self.started,
            counters=dict(self.counters),
            workers=[
                protocol.WorkerStatus(
                    name=worker.name, ready=worker.tested, num_held=len(worker.held),
                    num_delivered=worker.num_delivered, engine_busy=worker.engine_busy,
                    silent_seconds=now - worker.heard,
                )
                for worker in workers
            ],
        )  # fmt: skip

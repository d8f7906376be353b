"""Counters of the broker, and figures of the results that it delivered lately."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np

from hybrid_gkd.teacher.server.ledger import Ticket

RATE_SECONDS = 10.0
WINDOW_SECONDS = 60.0
MAX_SAMPLES = 4096
COUNTERS = (
    "delivered", "tokens", "refused", "requeued", "hedged", "expired", "abandoned", "undelivered", "late", "malformed"
)
"""delivered: results sent. refused: errors sent. requeued: given to another worker. hedged: those of them that a
silent engine still holds. expired: deadline passed. abandoned: the client went away. undelivered: the client did not
read, or was gone. late: answers to closed requests. malformed: invalid messages."""


class Sample(NamedTuple):
    """One delivered result; latency: seconds since the request arrived, service: since a worker was sent it."""

    time: float
    tokens: int
    response_tokens: int
    latency: float
    service: float
    num_bytes: int


class Statistics:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def add(self, ticket: Ticket, num_bytes: int) -> None:
        """A result of `num_bytes` was sent."""
        now, num_tokens = time.monotonic(), ticket.request.num_tokens
        num_response = sum(ticket.request.response_lengths)
        self.counters["delivered"] += 1
        self.counters["tokens"] += num_tokens
        self._samples.append(
            Sample(now, num_tokens, num_response, now - ticket.arrived, now - ticket.sent, num_bytes)
        )

    def _recent(self) -> list[Sample]:
        start = time.monotonic() - WINDOW_SECONDS
        return [each for each in self._samples if each.time >= start]

    def longest_usual_service(self) -> float:
        """99th percentile of the seconds that a worker takes; 0 while nothing is known."""
        samples = self._recent()
        return float(np.percentile([each.service for each in samples], 99)) if samples else 0.0

    def figures(self) -> dict[str, Any]:
        """The fields of `protocol.Status` that are computed from samples and counters."""
        samples, now = self._recent(), time.monotonic()
        # Over the last ten seconds, or since the start if that is less; over less where requests are very many.
        start = max(now - RATE_SECONDS, self._started)
        if len(samples) == MAX_SAMPLES:
            start = max(start, samples[0].time)
        response_tokens = sum(each.response_tokens for each in samples)
        latencies = np.percentile([each.latency for each in samples], (50, 95, 99)).tolist() if samples else []
        return {
            "tokens_per_second": sum(each.tokens for each in samples if each.time >= start) / max(now - start, 1.0),
            "latency_seconds": dict(zip(("p50", "p95", "p99"), latencies, strict=False)),
            "bytes_per_token": sum(each.num_bytes for each in samples) / max(response_tokens, 1),
            "uptime_seconds": now - self._started,
            "counters": dict(self.counters),
        }

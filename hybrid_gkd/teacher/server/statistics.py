"""Counters of the broker, and statistics of recent results."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

import numpy as np

from hybrid_gkd.teacher.server.records import Ticket

RATE_SECONDS, WINDOW_SECONDS, MAX_SAMPLES = 10.0, 60.0, 4096
COUNTERS = (
    "delivered", "tokens", "refused", "requeued", "hedged", "bad_replies", "expired", "abandoned", "undelivered",
    "late", "malformed",
)
"""Names of the counters, explained in docs/teacher.md."""


class Statistics:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._samples: deque[tuple[float, ...]] = deque(maxlen=MAX_SAMPLES)  # columns: see `_recent`

    def add(self, ticket: Ticket, num_bytes: int) -> None:
        """Record a delivered result of `num_bytes`."""
        now, tokens, scored_tokens = time.monotonic(), ticket.request.num_tokens, ticket.request.num_scored
        self.counters["delivered"] += 1
        self.counters["tokens"] += tokens
        self._samples.append((now, tokens, scored_tokens, num_bytes, now - ticket.arrived, now - ticket.sent))

    def _recent(self) -> np.ndarray:
        """Return [6, n] of recent results: time, tokens, scored tokens, bytes, seconds since arrival, at the worker."""
        samples = np.array(self._samples, np.float64).reshape(-1, 6)
        return samples[samples[:, 0] >= time.monotonic() - WINDOW_SECONDS].T

    def service_time_p99(self) -> float:
        """Return the 99th percentile of a worker's service time, seconds; 0 without results."""
        seconds = self._recent()[5]
        return float(np.percentile(seconds, 99)) if seconds.size else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the fields of `protocol.Status` that are computed from samples and counters."""
        (times, tokens, scored_tokens, num_bytes, latencies, _), now = self._recent(), time.monotonic()
        # The throughput is over the last ten seconds, since the start, or over the samples kept, whichever is shortest.
        start = max(now - RATE_SECONDS, self._started, times[0] if len(times) == MAX_SAMPLES else 0.0)
        percentiles = np.percentile(latencies, (50, 95, 99)).tolist() if latencies.size else []
        return {
            "tokens_per_second": float(tokens[times >= start].sum() / max(now - start, 1.0)),
            "latency_seconds": dict(zip(("p50", "p95", "p99"), percentiles, strict=False)),
            "bytes_per_token": float(num_bytes.sum() / max(scored_tokens.sum(), 1)),
            "uptime_seconds": now - self._started,
            "counters": dict(self.counters),
        }

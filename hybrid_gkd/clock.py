"""Time by named span."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Adds up seconds by name until `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block; also when it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """`timing/<name>` -> seconds since the last call."""
        taken, self._seconds = self._seconds, {}
        return {f"timing/{name}": seconds for name, seconds in taken.items()}

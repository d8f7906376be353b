"""The residency table of the hybrid engine, and the object that enforces it.

Actor and rollout engine share each GPU and take turns. `RESIDENCY` says which tenant is on the device in
which phase; `Residency.enter` moves from one phase to the next, releasing before it acquires, so that the
peak is never the sum of two phases. Nothing here knows about torch, FSDP or vLLM: a tenant is any object
with `acquire` and `release`, and one whose offload is switched off is simply not registered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

RESIDENCY: Mapping[str, frozenset[str]] = {
    "rollout": frozenset({"engine_weights", "kv_cache"}),
    "update": frozenset({"actor_params"}),
    "optimizer_step": frozenset({"actor_params", "optimizer_state"}),
    "publish": frozenset({"actor_params", "engine_weights"}),
}
"""Phase -> tenants on the device."""


class Tenant(Protocol):
    """Something that occupies device memory."""

    def acquire(self) -> None:
        """Bring it onto the device."""

    def release(self) -> None:
        """Take it off the device."""


class Residency:
    """Keeps the registered tenants where `RESIDENCY` wants them.

    Args:
        tenants: name -> tenant, in the order in which they are released; acquired in reverse.
        resident: names of the tenants that are on the device now.
    """

    def __init__(self, tenants: Mapping[str, Tenant], *, resident: set[str]):
        known = frozenset().union(*RESIDENCY.values())
        assert known.issuperset(tenants), f"unknown tenants: {set(tenants) - known}"
        self._tenants = dict(tenants)
        self._resident = resident & set(tenants)
        self.seconds = 0.0
        """Time spent moving tenants since `take_seconds` was last called."""

    def enter(self, phase: str) -> None:
        """Make the device hold what `phase` needs and nothing else that is registered."""
        wanted = RESIDENCY[phase]
        started = time.perf_counter()
        for name, tenant in self._tenants.items():
            if name in self._resident and name not in wanted:
                tenant.release()
                self._resident.discard(name)
        for name, tenant in reversed(self._tenants.items()):
            if name not in self._resident and name in wanted:
                tenant.acquire()
                self._resident.add(name)
        self.seconds += time.perf_counter() - started

    def take_seconds(self) -> float:
        """Seconds spent moving tenants since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

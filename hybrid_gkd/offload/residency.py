"""The residency table of the hybrid engine, and the object that enforces it.

Actor and rollout engine share each GPU and take turns. `RESIDENCY` says which tenant is on the device in
which phase; `Residency.enter` moves from one phase to the next, releasing before it acquires, so that the
peak is never the sum of two phases. Nothing here knows about torch, FSDP or vLLM: a tenant is any object
with `acquire`, `release` and `num_bytes`, so the mechanism is tested with stand-ins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from hybrid_gkd.errors import DeviceMemoryError

RESIDENCY: Mapping[str, frozenset[str]] = {
    "rollout": frozenset({"engine_weights", "kv_cache"}),
    "update": frozenset({"actor_params"}),
    "optimizer_step": frozenset({"actor_params", "optimizer_state"}),
    "publish": frozenset({"actor_params", "engine_weights"}),
}
"""Phase -> tenants on the device."""

TENANTS = ("kv_cache", "engine_weights", "optimizer_state", "actor_params")
"""In the order in which they are released; they are acquired in reverse. vLLM wants its weights before its cache."""


class Tenant(Protocol):
    """Something that occupies device memory."""

    def acquire(self) -> None:
        """Bring it onto the device."""

    def release(self) -> None:
        """Take it off the device."""

    def num_bytes(self) -> int:
        """Bytes that it takes on the device."""


class Residency:
    """Keeps tenants where `RESIDENCY` wants them.

    Args:
        tenants: by the names in `TENANTS`.
        movable: names of the tenants that may leave the device; the others always stay (offload switched off).
        resident: names of the tenants that are on the device now.
        free_bytes: bytes that can still be allocated on the device; None where there is no budget to keep.
    """

    def __init__(
        self,
        tenants: Mapping[str, Tenant],
        *,
        movable: set[str],
        resident: set[str],
        free_bytes: Callable[[], int] | None = None,
    ):
        assert set(TENANTS).issuperset(tenants), f"unknown tenants: {set(tenants) - set(TENANTS)}"
        self._tenants = {name: tenants[name] for name in TENANTS if name in tenants}
        self._movable = movable & set(tenants)
        self._resident = resident & set(tenants)
        self._free_bytes = free_bytes
        self._seconds: dict[str, float] = {}
        self._bytes: dict[tuple[str, str], int] = {}

    def enter(self, phase: str) -> None:
        """Make the device hold what `phase` needs and nothing else that may leave.

        Raises:
            DeviceMemoryError: a tenant does not fit; what had to be released before has been released.
        """
        wanted = RESIDENCY[phase]
        for name in [n for n in self._tenants if n in self._movable & self._resident and n not in wanted]:
            self._timed(f"release {name}", self._tenants[name].release)
            self._resident.discard(name)
        for name in [n for n in reversed(self._tenants) if n in wanted and n not in self._resident]:
            self._check_budget(phase, name)
            self._timed(f"acquire {name}", self._tenants[name].acquire)
            self._resident.add(name)
        for name in self._resident:
            self._bytes[phase, name] = self._tenants[name].num_bytes()

    def _timed(self, what: str, move: Callable[[], None]) -> None:
        started = time.perf_counter()
        move()
        self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - started

    def _check_budget(self, phase: str, name: str) -> None:
        if self._free_bytes is None:
            return
        needed, free = self._tenants[name].num_bytes(), self._free_bytes()
        if needed > free:
            others = ", ".join(f"{n} {self._tenants[n].num_bytes() / 2**30:.2f} GiB" for n in sorted(self._resident))
            raise DeviceMemoryError(
                f"phase {phase}: {name} needs {needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free; "
                f"there already: {others or 'no other tenant'}"
            )

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call by move, e.g. "acquire kv_cache"."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def bytes_by_phase(self) -> dict[tuple[str, str], int]:
        """(phase, tenant) -> bytes on the device when the phase was last entered; absent: not there."""
        return dict(self._bytes)

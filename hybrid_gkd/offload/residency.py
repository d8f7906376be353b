"""The residency table, and the object that enforces it.

Actor, critic and rollout engine share each GPU and take turns. `Residency.enter` moves from one phase to the next,
releasing before it acquires unless the device is known to have room for both; `Residency.prepare` starts the copies of
a later phase behind the work of this one, where there is room. Nothing here knows about torch, FSDP or vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from hybrid_gkd.errors import DeviceMemoryError

RESIDENCY: Mapping[str, frozenset[str]] = {
    "rollout": frozenset({"engine_weights", "kv_cache"}),
    "update": frozenset({"actor_params", "frozen_params"}),
    "optimizer_step": frozenset({"actor_params", "frozen_params", "optimizer_state"}),
    "publish": frozenset({"actor_params", "frozen_params", "engine_weights"}),
    "reference": frozenset({"ref_params"}),
    "reward_model": frozenset({"reward_model_params"}),
    "critic_update": frozenset({"critic_params"}),
    "critic_optimizer_step": frozenset({"critic_params", "critic_optimizer_state"}),
}
"""Phase -> owners on the device. A run has the phases whose owners it has. With LoRA the adapters are `actor_params`,
the weights below them `frozen_params`."""
CHANGING_PHASES = ("optimizer_step", "critic_optimizer_step")
"""The only phases in which the content of a memory owner may change: then a copy made before is stale."""
MODEL_OWNERS: Mapping[str, tuple[str, ...]] = {
    "actor": ("actor_params", "optimizer_state"), "critic": ("critic_params", "critic_optimizer_state"),
    "reference": ("ref_params",), "reward_model": ("reward_model_params",),
}
"""Model of a worker -> the owners of its parameters and, where it is trained, of its optimizer state."""
FROZEN = "frozen_params"
"""Of the actor, with LoRA."""
MEMORY_OWNERS = (
    "kv_cache", "engine_weights", "reward_model_params", "ref_params", "critic_optimizer_state", "critic_params",
    "optimizer_state", "frozen_params", "actor_params",
)  # fmt: skip
"""In the order in which they are released; they are acquired in reverse. vLLM wants its weights before its cache."""
MARGIN_BYTES = 4 * 2**30
"""Kept free when a memory owner comes before others have left: buckets of weights, activations in flight."""


class MemoryOwner(Protocol):
    """Something that occupies device memory. A subclass inherits the methods of an owner that copies nothing."""

    def acquire(self) -> None:
        """Bring it onto the device, or finish what `start_acquire` began."""

    def release(self) -> None:
        """Take it off the device, or finish what `start_release` began."""

    def start_acquire(self) -> bool:
        """Take the memory and begin to copy; False if that cannot be done in the background."""
        return False

    def start_release(self) -> None:
        """Begin to copy changed content to the host; the owner stays usable, for reading only."""
        return

    def changed(self) -> None:
        """Its content is about to change: copies on the host are stale."""
        return

    def num_bytes(self) -> int:
        """Bytes that it takes on the device."""


class Residency:
    """Keeps owners where `RESIDENCY` wants them.

    Args:
        owners: by the names in `MEMORY_OWNERS`.
        movable: names of the owners that may leave the device; the others always stay (offload switched off).
        resident: names of the owners that are on the device now.
        free_bytes: bytes that can still be allocated on the device; None where there is no budget to keep.
    """

    def __init__(
        self, owners: Mapping[str, MemoryOwner], *, movable: set[str], resident: set[str],
        free_bytes: Callable[[], int] | None = None,
    ):  # fmt: skip
        assert set(MEMORY_OWNERS).issuperset(owners), f"unknown owners: {set(owners) - set(MEMORY_OWNERS)}"
        self._owners = {name: owners[name] for name in MEMORY_OWNERS if name in owners}
        self._movable = movable & set(owners)
        self._resident = resident & set(owners)
        self._arriving: set[str] = set()
        self._free_bytes = free_bytes
        self._seconds: dict[str, float] = {}
        self._bytes: dict[tuple[str, str], int] = {}

    def enter(self, phase: str, *, finish: bool = True, changes: bool = True) -> None:
        """Make the device hold the owners of `phase`, a key of `RESIDENCY`, and no other that may leave.

        Without `finish` the others are released at the next `enter`, or when their room is needed. Without `changes`
        copies on the host stay valid also in one of `CHANGING_PHASES`: what is on the device is only read.

        Raises:
            DeviceMemoryError: a memory owner does not fit, after the others have been released.
        """
        wanted, owners = RESIDENCY[phase], self._owners
        leaving = self._unwanted(wanted)
        for name in leaving:
            self._timed(f"release {name}", owners[name].start_release)
        for name in [n for n in reversed(owners) if n in wanted - self._resident]:
            if name not in self._arriving and not self._fits_beside(name, MARGIN_BYTES):
                self._release(leaving)
                self._check_budget(phase, name)
            self._timed(f"acquire {name}", owners[name].acquire)
            self._arriving.discard(name)
            self._resident.add(name)
        if finish:
            self._release(leaving)
        if changes and phase in CHANGING_PHASES:
            for name in wanted & set(owners):
                owners[name].changed()
        self._bytes = {key: size for key, size in self._bytes.items() if key[0] != phase}
        self._bytes |= {(phase, name): owners[name].num_bytes() for name in self._resident.difference(leaving)}

    def prepare(self, phase: str, *, reserve: int = 0) -> int:
        """Start the copies that entering `phase` will need, and return at once; bytes of the owners brought in.

        Owners of `phase` are brought in where they fit beside all present ones and `reserve` bytes for the allocations
        of the present phase; the others are copied out, and must not change any more until `phase` is entered (or
        one of `CHANGING_PHASES` is).
        """
        wanted, arriving = RESIDENCY[phase], 0
        for name in [n for n in reversed(self._owners) if n in wanted - self._resident - self._arriving]:
            if self._fits_beside(name, reserve + MARGIN_BYTES) and self._owners[name].start_acquire():
                self._arriving.add(name)
                arriving += self._owners[name].num_bytes()
        for name in self._unwanted(wanted):
            self._owners[name].start_release()
        return arriving

    @property
    def takes_turns(self) -> bool:
        """Whether any memory owner may leave the device."""
        return bool(self._movable)

    def _unwanted(self, wanted: frozenset[str]) -> list[str]:
        present = self._resident | self._arriving
        return [name for name in self._owners if name in self._movable & present and name not in wanted]

    def _release(self, names: list[str]) -> None:
        while names:
            name = names.pop(0)
            self._timed(f"release {name}", self._owners[name].release)
            self._resident.discard(name)
            self._arriving.discard(name)

    def _timed(self, name: str, move: Callable[[], None]) -> None:
        started = time.perf_counter()
        move()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _fits_beside(self, name: str, reserve: int) -> bool:
        """Whether it fits although nothing has left yet. A memory owner that never came has no known size."""
        size = self._owners[name].num_bytes()
        return self._free_bytes is not None and 0 < size <= self._free_bytes() - reserve

    def _check_budget(self, phase: str, name: str) -> None:
        needed = self._owners[name].num_bytes()
        if self._free_bytes is not None and needed > (free := self._free_bytes()):
            others = ", ".join(f"{n} {self._owners[n].num_bytes() / 2**30:.2f} GiB" for n in sorted(self._resident))
            raise DeviceMemoryError(
                f"phase {phase}: {name} needs {needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free; "
                f"there already: {others or 'no other owner'}; the last checkpoint is intact. "
                "Switch on an offload (actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, those of "
                "critic.fsdp_config), lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or give vLLM or a "
                "teacher on this GPU a smaller gpu_memory_utilization"
            )

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call by move, e.g. "acquire kv_cache"."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def bytes_by_phase(self) -> dict[tuple[str, str], int]:
        """(phase, owner) -> bytes on the device when the phase was last entered; absent: not there, or leaving."""
        return dict(self._bytes)

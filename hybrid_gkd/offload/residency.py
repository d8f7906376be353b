"""The residency table, and the class that enforces it.

Actor, critic and rollout engine alternate on each GPU. `Residency.enter` moves from one phase to the next, releasing
before it acquires unless the device has room for both; `Residency.prepare` starts copies of a later phase in the
background, where there is room. This module does not depend on torch, FSDP or vLLM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from hybrid_gkd.errors import DeviceMemoryError

RESIDENCY: Mapping[str, frozenset[str]] = {
    "rollout": frozenset({"engine_weights", "kv_cache"}),
    "update": frozenset({"actor_params", "frozen_params"}),
    "optimizer_step": frozenset({"actor_params", "frozen_params", "optimizer_state", "ema_params"}),
    "publish": frozenset({"actor_params", "frozen_params", "engine_weights"}),
    "ema_teacher": frozenset({"actor_params", "frozen_params", "ema_params"}),
    "reference": frozenset({"ref_params"}),
    "reward_model": frozenset({"reward_model_params"}),
    "critic_update": frozenset({"critic_params"}),
    "critic_optimizer_step": frozenset({"critic_params", "critic_optimizer_state"}),
}
"""Phase -> owners on the device. A run has the phases of its owners. With LoRA the adapters are `actor_params`, the
base weights `frozen_params`. `ema_params` is the moving average of the actor's."""
CHANGING: Mapping[str, frozenset[str]] = {
    "optimizer_step": RESIDENCY["optimizer_step"] - {"frozen_params"},
    "critic_optimizer_step": RESIDENCY["critic_optimizer_step"], "ema_teacher": frozenset({"actor_params"}),
}  # fmt: skip
"""Phase -> owners whose content may change in it, which invalidates earlier copies."""
MODEL_OWNERS: Mapping[str, tuple[str, ...]] = {
    "actor": ("actor_params", "optimizer_state"), "critic": ("critic_params", "critic_optimizer_state"),
    "reference": ("ref_params",), "reward_model": ("reward_model_params",),
}
"""Model of a worker -> owners of its parameters and, if it is trained, of its optimizer state."""
FROZEN, EMA = "frozen_params", "ema_params"
"""Owners of the base weights with LoRA, and of the moving average of trained parameters, if that is the teacher."""
MEMORY_OWNERS = (
    "kv_cache", "engine_weights", "reward_model_params", "ref_params", "critic_optimizer_state", "critic_params",
    "ema_params", "optimizer_state", "frozen_params", "actor_params",
)  # fmt: skip
"""In the order of release; they are acquired in reverse. vLLM restores its weights before its cache."""
MARGIN_BYTES = 4 * 2**30
"""Memory kept free when a memory owner is acquired before others are released: buckets of weights, activations."""


class MemoryOwner(Protocol):
    """Something that occupies device memory. The default methods are those of an owner without host copies."""

    def acquire(self) -> None:
        """Bring the owner onto the device, or finish what `start_acquire` began."""

    def release(self) -> None:
        """Take the owner off the device, or finish what `start_release` began."""

    def start_acquire(self, room: int, most: int) -> int:
        """Begin to acquire at most `room` bytes, and about `most`; return the bytes still missing.

        An owner that cannot do this in the background acquires nothing.
        """
        return self.num_bytes()

    def start_release(self) -> None:
        """Begin to copy changed content to the host; the owner stays readable."""
        return

    def changed(self) -> None:
        """Mark host copies as stale, since the content is about to change."""
        return

    def num_bytes(self) -> int:
        """Return the bytes of the owner on the device."""


class Residency:
    """Keeps owners on the device as `RESIDENCY` requires.

    Args:
        owners: by the names in `MEMORY_OWNERS`.
        movable: names of owners that may leave the device; others always stay (offload disabled).
        resident: names of owners that are on the device now.
        free_bytes: returns the bytes that can still be allocated on the device; None disables the budget.
    """

    def __init__(
        self, owners: Mapping[str, MemoryOwner], *, movable: set[str], resident: set[str],
        free_bytes: Callable[[], int] | None = None,
    ):  # fmt: skip
        assert set(MEMORY_OWNERS).issuperset(owners), f"unknown owners: {set(owners) - set(MEMORY_OWNERS)}"
        self._owners = {name: owners[name] for name in MEMORY_OWNERS if name in owners}
        self._movable = movable & set(owners)
        self._resident = resident & set(owners)
        self._arriving: dict[str, int] = {}
        """Partly acquired owners -> bytes still missing."""
        self._free_bytes = free_bytes
        self._seconds: dict[str, float] = {}
        self._present: dict[str, list[str]] = {}
        """Phase -> owners on the device when it was last entered, without leaving ones."""

    def enter(
        self, phase: str, *, finish: bool = True, changes: bool = True, beside: str | None = None, reserve: int = 0
    ) -> None:
        """Make the device hold the owners of `phase`, a key of `RESIDENCY`, and no other movable ones.

        Without `finish` other owners are released at the next `enter`, or when their memory is needed. Without
        `changes` host copies stay valid also in one of `CHANGING`, since the content is only read.

        `beside`: a phase that follows soon. Its owners that are present stay if there are `reserve` bytes for
        allocations of `phase` beside them.

        Raises DeviceMemoryError: a memory owner does not fit after the others have been released.
        """
        wanted, owners = RESIDENCY[phase], self._owners
        if beside is not None and self._room(reserve + MARGIN_BYTES) > 0:
            wanted |= RESIDENCY[beside]
        leaving = self._unwanted(wanted)
        for name in leaving:
            self._timed(f"release {name}", owners[name].start_release)
        for name in self._absent(phase):
            if self._arriving.get(name) != 0 and not 0 < self._needed(name) <= self._room(MARGIN_BYTES):
                self._release(leaving)
                self._check_budget(phase, name)
            self._timed(f"acquire {name}", owners[name].acquire)
            self._arriving.pop(name, None)
            self._resident.add(name)
        if finish:
            self._release(leaving)
        if changes:
            for name in CHANGING.get(phase, frozenset()) & set(owners):
                owners[name].changed()
        self._present[phase] = [name for name in owners if name in self._resident.difference(leaving)]

    def prepare(self, phase: str, *, reserve: int = 0, most: int = sys.maxsize) -> int:
        """Start copies that entering `phase` will need, without waiting; return the bytes being acquired.

        Owners of `phase` are acquired, about `most` bytes of them, as far as they fit beside the present ones and
        `reserve` bytes for allocations of the present phase; the next call continues. Other owners are copied to the
        host, and must not change until `phase` or one of `CHANGING` is entered.
        """
        coming = 0
        for name in self._absent(phase):
            needed, room = self._needed(name), self._room(reserve + MARGIN_BYTES)
            if needed and coming < most and room > 0:
                missing = self._owners[name].start_acquire(room, most - coming)
                if missing < needed:
                    self._arriving[name] = missing
                    coming += needed - missing
        for name in self._unwanted(RESIDENCY[phase]):
            self._owners[name].start_release()
        return coming

    def missing(self, phase: str) -> int:
        """Return the known bytes of owners of `phase` that are neither on the device nor being acquired."""
        return sum(self._needed(name) for name in self._absent(phase))

    @property
    def has_movable_owners(self) -> bool:
        """Return whether any memory owner may leave the device."""
        return bool(self._movable)

    def _unwanted(self, wanted: frozenset[str]) -> list[str]:
        present = self._resident | self._arriving.keys()
        return [name for name in self._owners if name in self._movable & present and name not in wanted]

    def _release(self, names: list[str]) -> None:
        while names:
            name = names.pop(0)
            self._timed(f"release {name}", self._owners[name].release)
            self._resident.discard(name)
            self._arriving.pop(name, None)

    def _timed(self, name: str, move: Callable[[], None]) -> None:
        started = time.perf_counter()
        move()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _absent(self, phase: str) -> list[str]:
        """Return the owners that `phase` needs and that are not fully on the device, in the order of acquisition."""
        return [name for name in reversed(self._owners) if name in RESIDENCY[phase] - self._resident]

    def _needed(self, name: str) -> int:
        """Return the missing bytes of an absent owner; 0 if its size is unknown because it was never acquired."""
        return self._arriving[name] if name in self._arriving else self._owners[name].num_bytes()

    def _room(self, reserve: int) -> int:
        """Return the free bytes beyond `reserve`; 0 without a budget."""
        return 0 if self._free_bytes is None else self._free_bytes() - reserve

    def _check_budget(self, phase: str, name: str) -> None:
        needed = self._needed(name)
        if self._free_bytes is not None and needed > (free := self._free_bytes()):
            others = ", ".join(f"{n} {self._owners[n].num_bytes() / 2**30:.2f} GiB" for n in sorted(self._resident))
            raise DeviceMemoryError(
                f"phase {phase}: {name} needs {needed / 2**30:.2f} GiB on the device, {free / 2**30:.2f} GiB are free; "
                f"in use: {others or 'no other owner'}; the last checkpoint is intact. "
                "Enable an offload (actor_rollout_ref.actor.fsdp_config.param_offload, .optimizer_offload, those of "
                "critic.fsdp_config), lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or lower the "
                "gpu_memory_utilization of vLLM or a teacher on this GPU"
            )

    def take_seconds(self) -> dict[str, float]:
        """Return seconds since the last call by move, e.g. "acquire kv_cache"."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def bytes_by_phase(self) -> dict[tuple[str, str], int]:
        """Return (phase, owner) -> present size of the owners that were on the device when the phase was last entered;
        absent or leaving ones have no entry."""
        sizes = {name: owner.num_bytes() for name, owner in self._owners.items()}
        return {(phase, name): sizes[name] for phase, names in self._present.items() for name in names}

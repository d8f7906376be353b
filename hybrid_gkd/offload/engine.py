"""The rollout engine's part of the residency: its weights and its KV cache.

vLLM frees both in one call and wakes them one after the other; what they take is measured while they wake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hybrid_gkd.offload.residency import MARGIN_BYTES

if TYPE_CHECKING:
    from hybrid_gkd.rollout.engine import RolloutEngine


class EngineOwner:
    """`acquire` wakes one of the two; its size is known from the first time on. Nothing happens in the background.

    Args:
        wake: takes the memory.
        num_bytes: size of one that never wakes because it never sleeps.
    """

    def __init__(self, wake: Callable[[], None], num_bytes: int = 0):
        self._wake = wake
        self._num_bytes = num_bytes

    def num_bytes(self) -> int:
        """Bytes as measured when it last woke; before, those that it was made with."""
        return self._num_bytes

    def start_acquire(self) -> bool:
        """See `MemoryOwner`: vLLM only wakes while one waits."""
        return False

    def start_release(self) -> None:
        """See `MemoryOwner`: there is nothing to copy."""

    def changed(self) -> None:
        """See `MemoryOwner`: there is no copy."""

    def acquire(self) -> None:
        """Wake. Memory that torch has cached is given back first if it is needed: vLLM allocates beside it."""
        if not self._num_bytes or self._num_bytes + MARGIN_BYTES > torch.cuda.mem_get_info()[0]:
            torch.cuda.empty_cache()  # waits for all copies in flight
        before = torch.cuda.mem_get_info()[0]
        self._wake()
        self._num_bytes = max(0, before - torch.cuda.mem_get_info()[0])


class EngineWeights(EngineOwner):
    """The engine's weights, undefined after `acquire` until they are published."""

    def __init__(self, engine: RolloutEngine, num_bytes: int = 0):
        super().__init__(engine.wake_weights, num_bytes)

    def release(self) -> None:
        """Nothing left to free: the weights never outlive the KV cache."""


class KVCache(EngineOwner):
    """The engine's KV cache; releasing it frees the weights too.

    Args:
        engine: the engine.
        on_release: called after the weights have been lost.
        num_bytes: see `EngineOwner`.
    """

    def __init__(self, engine: RolloutEngine, on_release: Callable[[], None], num_bytes: int = 0):
        super().__init__(engine.wake_kv_cache, num_bytes)
        self._sleep = engine.sleep
        self._on_release = on_release

    def release(self) -> None:
        """Free cache and weights."""
        self._sleep()
        self._on_release()

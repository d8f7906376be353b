"""The rollout engine's part of the residency: its weights and its KV cache.

vLLM frees both in one call and wakes them one after the other; their sizes are measured while they wake.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybrid_gkd.offload.residency import MARGIN_BYTES, MemoryOwner


class EngineOwner(MemoryOwner):
    """Either of the two. Nothing happens in the background.

    Args:
        wake: takes the memory.
        release: frees it. Releasing the KV cache frees the weights too, so that they need no release of their own.
        num_bytes: size of one that never wakes because it never sleeps.
    """

    def __init__(self, wake: Callable[[], None], release: Callable[[], None] = lambda: None, num_bytes: int = 0):
        self._wake, self._release = wake, release
        self._num_bytes = num_bytes

    def num_bytes(self) -> int:
        """Bytes as measured when it last woke; before, as given."""
        return self._num_bytes

    def acquire(self) -> None:
        """Wake. Memory in torch's cache is given back first if it is needed: vLLM does not allocate from it."""
        if not self._num_bytes or self._num_bytes + MARGIN_BYTES > torch.cuda.mem_get_info()[0]:
            torch.cuda.empty_cache()  # waits for all copies in flight
        before = torch.cuda.mem_get_info()[0]
        self._wake()
        self._num_bytes = max(0, before - torch.cuda.mem_get_info()[0])

    def release(self) -> None:
        """Free the memory."""
        self._release()

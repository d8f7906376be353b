"""Host copies of device tensors, in pinned memory that is allocated once.

FSDP2 keeps several views of one parameter shard, so a shard is moved by emptying its *storage* and filling
it again: every view stays valid and nothing has to be registered anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor

ALIGNMENT = 512
"""Bytes; copies to and from aligned addresses run at the speed of the bus."""
SMALL = 64
"""Bytes up to which a tensor stays where it is: Adam's step counters."""


class PinnedArena:
    """One piece of page-locked host memory.

    Registered by hand, because torch's own pinned allocator rounds sizes up to powers of two: with 60 GB of
    optimizer state that is the difference between fitting into a host and not.

    Raises:
        MemoryError: the host does not have the memory or must not lock it.
    """

    def __init__(self, num_bytes: int):
        # Written once by all threads: locking pages that exist already is an order of magnitude faster.
        self.buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            raise MemoryError(f"cannot lock {num_bytes / 2**30:.1f} GiB of host memory: {error}")

    def close(self) -> None:
        """Unlock the memory."""
        torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())


class HostMirror:
    """A residency tenant: tensors that are either on the device or in pinned host memory.

    Args:
        tensors: gives the tensors now; asked at every release, since optimizer state appears with the
            first step and is replaced when a checkpoint is loaded.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]):
        self._tensors = tensors
        self._arena: PinnedArena | None = None
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def num_bytes(self) -> int:
        """Bytes of the tensors, wherever they are."""
        if self._away:
            return sum(host.numel() for _, host in self._away)
        return sum(storage.nbytes() for storage in self._storages())

    def release(self) -> None:
        """Copy to the host and give the device memory back. One synchronisation for all tensors."""
        storages = [storage for storage in self._storages() if storage.device.type == "cuda"]
        offsets, end = [], 0
        for storage in storages:
            offsets.append(end)
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        arena = self._arena_of(end)
        for storage, offset in zip(storages, offsets, strict=True):
            host = arena[offset : offset + storage.nbytes()]
            host.copy_(_as_bytes(storage), non_blocking=True)
            self._away.append((storage, host))
        torch.cuda.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def acquire(self) -> None:
        """Bring everything back. One synchronisation for all tensors."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _as_bytes(storage).copy_(host, non_blocking=True)
        self._away = []
        torch.cuda.synchronize()

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each storage once, tiny ones left out."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage.nbytes() > SMALL:
                found[storage._cdata] = storage
        return list(found.values())

    def _arena_of(self, num_bytes: int) -> torch.Tensor:
        """The arena, made anew if it is too small: with the first optimizer step, or another model state."""
        if self._arena is None or self._arena.buffer.numel() < num_bytes:
            if self._arena is not None:
                self._arena.close()
            self._arena = PinnedArena(max(num_bytes, ALIGNMENT))
        return self._arena.buffer


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

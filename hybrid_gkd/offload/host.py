"""Host copies of device tensors, in pinned memory that is allocated once.

FSDP2 keeps several views of one parameter shard, so a shard is moved by emptying its *storage* and filling
it again: every view stays valid and nothing has to be registered anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.distributed.tensor import DTensor


class HostMirror:
    """A residency tenant: tensors that are either on the device or in pinned host memory.

    Args:
        tensors: gives the tensors now; asked at every release, since optimizer state appears with the
            first step and is replaced when a checkpoint is loaded.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]):
        self._tensors = tensors
        self._host: dict[int, torch.Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def release(self) -> None:
        """Copy to the host and give the device memory back. One synchronisation for all tensors."""
        seen: set[int] = set()
        hosts: dict[int, torch.Tensor] = {}
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            # A tensor of a few bytes (Adam's step counter) is not worth a copy, and some live on the host.
            if not local.is_cuda or storage.nbytes() <= 64 or storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            host = self._host.get(storage._cdata)
            if host is None or host.numel() != storage.nbytes():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            host.copy_(_as_bytes(storage), non_blocking=True)
            hosts[storage._cdata] = host
            self._away.append((storage, host))
        self._host = hosts
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


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""Host copies of device tensors, in pinned memory that is allocated once.

FSDP2 keeps several views of one parameter shard, so a shard is moved by resizing its *storage* to 0 and back: every
view stays valid and nothing has to be registered again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import torch

from hybrid_gkd.compat.torch import local_shard
from hybrid_gkd.offload.residency import MemoryOwner

ALIGNMENT = 512
"""Alignment in bytes; copies to and from aligned addresses run at full bus speed."""
ROUNDING_BYTES = 4 * 2**20
"""Padding for some thousand tensors at aligned addresses."""
SMALL = 64
"""Maximum size in bytes of tensors that are not moved: Adam's step counters."""


@functools.cache
def copy_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for copies between the host and this device."""
    return torch.cuda.Stream(device)


class OffloadedTensors(MemoryOwner):
    """A memory owner: tensors that are either on the device or in pinned host memory.

    Copies run on their own stream after the work queued before them, and overlap later work; all such owners share the
    stream, since they share the bus. `tensors` is called at every release, since optimizer state appears with the first
    step and is replaced when a checkpoint is loaded.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]):
        self._tensors = tensors
        self.arena: torch.Tensor | None = None
        self._copy: tuple[str, int, torch.cuda.Event, torch.cuda.Event] | None = None
        """Direction, bytes, start and end of the last copy in flight."""
        self._on_host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Storages with their host copies, which are valid or being made."""
        self._missing: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """Storages that are not on the device, the first to be restored last; empty if all tensors are there."""
        self.gigabytes_per_second: dict[str, float] = {}
        """Rates of the last copies "in" and "out", measured by the device."""

    def num_bytes(self) -> int:
        if self._missing:
            return sum(host.numel() for _, host in self._on_host)
        return sum(storage.nbytes() for storage in self._storages())

    def changed(self) -> None:
        assert not self._missing, "tensors that are not on the device cannot change"
        self._finish()
        self._on_host = []

    def start_release(self) -> None:
        if self._missing:  # unchanged since the copies were made
            return
        storages = [storage for storage in self._storages() if storage.device.type == "cuda"]
        # New tensors (first optimizer step, a checkpoint) have no copies yet.
        if {s.data_ptr() for s in storages} == {s.data_ptr() for s, _ in self._on_host}:
            return
        self._finish()
        lengths = [-(-storage.nbytes() // ALIGNMENT) * ALIGNMENT for storage in storages]
        arena = self._make_arena(sum(lengths))
        places = zip(storages, arena[: sum(lengths)].split(lengths), strict=True)
        self._on_host = [(storage, place[: storage.nbytes()]) for storage, place in places]
        self._start_copy("out", [(host, _as_bytes(storage)) for storage, host in self._on_host])

    def release(self) -> None:
        self.start_release()
        self._finish()
        for storage, _ in self._on_host:
            storage.resize_(0)
        self._missing = self._on_host[::-1]

    def start_acquire(self, room: int = sys.maxsize, most: int = sys.maxsize) -> int:
        coming = list[tuple[torch.UntypedStorage, torch.Tensor]]()
        try:
            for storage, host in reversed(self._missing):
                if most <= 0 or host.numel() > room:
                    break
                coming.append((storage, host))
                storage.resize_(host.numel())
                room, most = room - host.numel(), most - host.numel()
        except torch.OutOfMemoryError:
            for storage, _ in coming:
                storage.resize_(0)
            raise
        self._missing = self._missing[: len(self._missing) - len(coming)]
        self._start_copy("in", [(_as_bytes(storage), host) for storage, host in coming])
        return sum(host.numel() for _, host in self._missing)

    def acquire(self) -> None:
        self.start_acquire()
        self._finish()

    def _start_copy(self, direction: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (destination, source) pairs after the copies in flight."""
        if not pairs:
            return
        stream = copy_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record()
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            end.record()
        self._copy = direction, sum(source.numel() for _, source in pairs), start, end

    def _finish(self) -> None:
        if self._copy is None:
            return
        direction, num_bytes, start, end = self._copy
        end.synchronize()
        self._copy = None
        self.gigabytes_per_second[direction] = num_bytes / 1e6 / max(start.elapsed_time(end), 1e-3)

    @torch.no_grad()  # with gradients, to_local is an autograd function: 4 ms for the 870 tensors of a 0.5B student
    def _storages(self) -> list[torch.UntypedStorage]:
        """Return each storage once, without small ones."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = local_shard(tensor).untyped_storage()
            if storage.nbytes() > SMALL:
                found[storage.data_ptr()] = storage
        return list(found.values())

    def _make_arena(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of at least `num_bytes`, reallocated if the last one is too small.

        Raises MemoryError as `page_locked`.
        """
        if self.arena is None or self.arena.numel() < num_bytes:
            self.arena, self._on_host = None, []  # free the last one first
            self.arena = page_locked(max(num_bytes, ALIGNMENT))
        return self.arena


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def page_locked(num_bytes: int) -> torch.Tensor:
    """Return page-locked host memory, which is unlocked after its last use.

    It is registered by hand, because torch's pinned allocator rounds sizes up to powers of two, which can make 60 GB of
    optimizer state too large for a host. Raises MemoryError if the host lacks the memory or the permission to lock it.
    """
    memory, runtime = _host_memory(num_bytes), torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.ctypes.data, num_bytes, 0))
    if error != 0:
        del memory  # the error keeps this frame alive, and a handler may allocate as much again
        with contextlib.suppress(RuntimeError):
            torch.zeros((), device="cuda")  # clear the CUDA error, which the next launch would raise
        raise MemoryError(f"cannot lock {num_bytes / 2**30:.1f} GiB of host memory: CUDA error {error}")
    # Later memory at the same address could not be locked otherwise.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
    return torch.from_numpy(memory)


def _host_memory(num_bytes: int) -> np.ndarray:
    """Return zeros, uint8 [num_bytes], at an aligned address.

    Raises MemoryError, unlike torch, which raises RuntimeError.
    """
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)  # a large array begins 16 bytes after a page boundary
    memory = memory[-memory.ctypes.data % ALIGNMENT :][:num_bytes]
    # Written by all threads: locking existing pages is an order of magnitude faster.
    torch.from_numpy(memory).zero_()
    return memory


class HostCopies:
    """Copies of tensors in reusable host memory, page-locked on a GPU machine.

    Each copy has its own storage, as writers of safetensors require.
    """

    def __init__(self, *, locked: bool):
        self._locked = locked
        self._blocks: list[tuple[torch.Tensor, int]] = []
        """Memory blocks and their used bytes."""

    def reserve(self, num_bytes: int) -> None:
        """Allocate `num_bytes` more. Raises MemoryError as `page_locked`."""
        num_bytes += ROUNDING_BYTES
        block = page_locked(num_bytes) if self._locked else torch.from_numpy(_host_memory(num_bytes))
        self._blocks.append((block, 0))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy, which is complete after `finish`.

        Raises MemoryError if more memory is needed and not available.
        """
        length = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        number = next((n for n, (block, used) in enumerate(self._blocks) if used + length <= block.numel()), None)
        if number is None:
            self.reserve(length)
            number = len(self._blocks) - 1
        block, used = self._blocks[number]
        self._blocks[number] = block, used + length
        place = torch.from_numpy(block.numpy()[used : used + tensor.nbytes])
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """Wait for the copies."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def clear(self) -> None:
        """Drop all copies and reuse their memory."""
        self._blocks = [(block, 0) for block, _ in self._blocks]

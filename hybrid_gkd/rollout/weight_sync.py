"""Weights from the student's pool to the rollout engine's: packed buckets, one broadcast each.

The first worker that trains and all workers that generate are one process group of their own, built once. The
contents of each bucket follow from the layout that both sides know, so that only values travel.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.store import open_store
from hybrid_gkd.rollout.weights import Layout, Names, cut
from hybrid_gkd.runtime.waiting import Timeout

Bucket = list[tuple[Names, Tensor]]
POLL_SECONDS = 2e-4
ABORT_SECONDS = 60.0
"""NCCL ends the process that waits longer than its own limit, and with it the student's last state; ours is shorter."""


class WeightSync:
    """Member `rank` of `size` of the group: rank 0 sends, the others receive.

    Args:
        address: host and port at which rank 0 listens.
        layout: of the student's weights, the same on all members.
        dtype: in which they travel.
        device: of this member's weights; decides between NCCL and gloo.
        bucket_bytes: largest broadcast, unless a single weight is larger.
        timeout: seconds for the group to form, and for all broadcasts of one `send` or `receive`.

    Raises:
        WorkerError: the group did not form.
    """

    def __init__(
        self, address: tuple[str, int], *, rank: int, size: int, layout: Layout, dtype: torch.dtype,
        device: torch.device, bucket_bytes: int, timeout: float,
    ):  # fmt: skip
        self.rank, self.dtype, self.device, self.timeout = rank, dtype, device, timeout
        self.buckets = cut(layout, bucket_bytes // dtype.itemsize)
        try:
            store = open_store(address, rank=rank, size=size, timeout=timeout)
            self._group: Any
            if device.type == "cuda":
                nccl: Any = dist.ProcessGroupNCCL  # its stub leaves this constructor out
                limit = timedelta(seconds=timeout + ABORT_SECONDS)
                self._group = nccl(dist.PrefixStore("weights", store), rank, size, limit)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
            # Connect now, so that an unreachable address shows at the start of a run.
            self._finish([], self._broadcast(torch.zeros(1, device=device)), time.monotonic() + timeout)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"the group for weights did not form at {address[0]}:{address[1]} within {self._limit}: {error}"
            ) from error

    @property
    def _limit(self) -> Timeout:
        return Timeout(self.timeout, "actor_rollout_ref.nccl_timeout")

    @torch.no_grad()
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast full tensors, in the order of the layout; while a bucket travels the next one is packed.

        Raises:
            WorkerError: a receiver is gone, or did not take all weights within the timeout.
        """
        stream = iter(weights)

        def pack(bucket: Bucket) -> None:
            for names, part in bucket:
                for name in names:
                    found, tensor = next(stream)
                    assert found == name, (found, name)
                part.copy_(tensor)

        for _ in self._broadcast_all(pack):
            pass

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under all their names, in order; the next bucket travels while one is used.

        No memory is used twice: the engine may keep a tensor for as long as it likes.

        Raises:
            WorkerError: the sender is gone, or did not send all weights within the timeout.
        """
        for bucket in self._broadcast_all(lambda bucket: None):
            for names, part in bucket:
                yield from ((name, part) for name in names)

    def _broadcast_all(self, fill: Callable[[Bucket], None]) -> Iterator[Bucket]:
        """Fill and broadcast every bucket, at most two at a time, and yield each when it has arrived."""
        deadline = time.monotonic() + self.timeout
        travelling: deque[tuple[Bucket, Any]] = deque()
        for layout in self.buckets:
            lengths = [shape.numel() for _, shape in layout]
            packed = torch.empty(sum(lengths), dtype=self.dtype, device=self.device)
            parts = zip(layout, packed.split(lengths), strict=True)
            bucket = [(names, part.view(shape)) for (names, shape), part in parts]
            fill(bucket)
            travelling.append((bucket, self._broadcast(packed)))
            if len(travelling) > 1:
                yield self._finish(*travelling.popleft(), deadline)
        for last in travelling:
            yield self._finish(*last, deadline)

    def _broadcast(self, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        return self._group.broadcast([tensor], options)

    def _finish(self, bucket: Bucket, work: Any, deadline: float) -> Bucket:
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()
                raise WorkerError(f"weights were not passed on within {self._limit}: a worker of the group hangs")
            time.sleep(POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:  # torch's own types, of both backends
            raise WorkerError(f"weights were not passed on: {str(error).splitlines()[0]}") from error
        return bucket

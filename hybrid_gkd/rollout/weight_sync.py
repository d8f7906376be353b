"""Weight sync from the student's pool to the rollout pool: packed buckets, one broadcast each.

The first training worker and all rollout workers form a separate process group, built once. Both sides derive the
contents of each bucket from the same layout, so that only values are sent.
"""

from __future__ import annotations

import itertools
import operator
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_gkd.compat.ray import is_cancelled
from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.weights import Layout, Names, split_buckets
from hybrid_gkd.runtime.waiting import Timeout

Bucket = list[tuple[Names, Tensor]]
POLL_SECONDS = 2e-4
ABORT_SECONDS = 60.0
"""Margin of NCCL's timeout over ours: NCCL would end the process, and with it the student's last state."""


def open_store(address: tuple[str, int], *, rank: int, size: int, timeout: float) -> dist.Store:
    """Open the store of a process group; rank 0 listens at `address` only. A single process needs no socket.

    torch's own listeners accept connections, which it does not authenticate, on all interfaces. Raises RuntimeError or
    OSError: the other ranks do not connect within `timeout` seconds, or the port is in use.
    """
    if size == 1:
        return dist.HashStore()
    limit = timedelta(seconds=timeout)
    if rank > 0:
        return dist.TCPStore(*address, size, False, limit)
    listener = socket.create_server(address)
    return dist.TCPStore(*address, size, True, limit, master_listen_fd=listener.detach())


class WeightSync:
    """Member `rank` of `size` of the weight sync group: rank 0 sends, the others receive.

    Args:
        address: host and port at which rank 0 listens.
        layout: layout of the student's weights, the same on all members.
        dtype: data type of the transfer, but for tensors that keep their own.
        device: device of this member's weights: cuda uses NCCL, otherwise gloo.
        bucket_bytes: size of the largest broadcast, unless a single weight is larger.
        timeout: seconds for the group to form, and for all broadcasts of one `send` or `receive`.

    Raises WorkerError: the group cannot be formed.
    """

    def __init__(
        self, address: tuple[str, int], *, rank: int, size: int, layout: Layout, dtype: torch.dtype,
        device: torch.device, bucket_bytes: int, timeout: float,
    ):  # fmt: skip
        self.rank, self.device, self.timeout = rank, device, timeout
        self.buckets = [
            (own or dtype, bucket) for own, part in itertools.groupby(layout, key=operator.itemgetter(2))
            for bucket in split_buckets([each[:2] for each in part], bucket_bytes // (own or dtype).itemsize)
        ]  # fmt: skip
        """Names and shapes by bucket, all of one type."""
        try:
            store = open_store(address, rank=rank, size=size, timeout=timeout)
            self._group: Any
            if device.type == "cuda":
                nccl: Any = dist.ProcessGroupNCCL  # its type stub lacks this constructor
                limit = timedelta(seconds=timeout + ABORT_SECONDS)
                self._group = nccl(dist.PrefixStore("weights", store), rank, size, limit)
            else:
                self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
            # Connect now, so that an unreachable address fails at the start of a run.
            self._finish([], self._broadcast(torch.zeros(1, device=device)), time.monotonic() + timeout)
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"cannot form the weight sync group at {address[0]}:{address[1]} within {self._limit}: {error}"
            ) from error

    def close(self) -> None:
        """Leave the group, of which other members may be lost."""
        self._group.abort()

    @property
    def _limit(self) -> Timeout:
        return Timeout(self.timeout, "actor_rollout_ref.nccl_timeout")

    @torch.no_grad()
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast full tensors in the order of the layout, packing a bucket while the previous one is in flight.

        Raises WorkerError: a receiver is lost, or the timeout has passed.
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
        """Yield the full weights under all their names, in order, while the next bucket is in flight.

        Memory is not reused: the engine may keep the tensors.

        Raises WorkerError: the sender is lost, or the timeout has passed.
        """
        for bucket in self._broadcast_all(lambda bucket: None):
            for names, part in bucket:
                yield from ((name, part) for name in names)

    def _broadcast_all(self, fill: Callable[[Bucket], None]) -> Iterator[Bucket]:
        """Fill and broadcast all buckets, at most two in flight; yield each on completion."""
        deadline = time.monotonic() + self.timeout
        in_flight: deque[tuple[Bucket, Any]] = deque()
        for dtype, layout in self.buckets:
            lengths = [shape.numel() for _, shape in layout]
            packed = torch.empty(sum(lengths), dtype=dtype, device=self.device)
            parts = zip(layout, packed.split(lengths), strict=True)
            bucket = [(names, part.view(shape)) for (names, shape), part in parts]
            fill(bucket)
            in_flight.append((bucket, self._broadcast(packed)))
            if len(in_flight) > 1:
                yield self._finish(*in_flight.popleft(), deadline)
        for last in in_flight:
            yield self._finish(*last, deadline)

    def _broadcast(self, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        return self._group.broadcast([tensor], options)

    def _finish(self, bucket: Bucket, work: Any, deadline: float) -> Bucket:
        while not work.is_completed():
            if is_cancelled():  # another member has failed, for which NCCL would wait
                self._group.abort()
                raise WorkerError("weight sync cancelled: another worker of the group has failed")
            if time.monotonic() > deadline:
                self._group.abort()
                raise WorkerError(f"weight sync not complete within {self._limit}: a worker of the group hangs")
            time.sleep(POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:  # the error types of both backends derive from it
            raise WorkerError(f"weight sync failed: {str(error).splitlines()[0]}") from error
        return bucket

"""Weights from the student's pool to the rollout engine's: packed buckets, one broadcast each.

The first worker that trains and all workers that generate are one process group of their own, built once. The
contents of each bucket follow from the layout that both sides know, so that only values travel. Knows torch and its
process groups, but neither an engine nor Ray.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.rollout.weights import WeightSpec, cut

POLL_SECONDS = 2e-4
ABORT_SECONDS = 60.0
"""NCCL ends the process that waits longer than its own limit, and with it the student's last state; ours is shorter."""


class WeightSync:
    """One member of the group: rank 0 sends, the others receive.

    Args:
        address: host and port at which rank 0 listens.
        rank, size: of this member.
        layout: of the student's weights, the same on all members.
        dtype: in which they travel.
        device: of this member's weights; decides between NCCL and gloo.
        bucket_bytes: largest broadcast, unless a single weight is larger.
        timeout: seconds for the group to form, and for all broadcasts of one `send` or `receive`.

    Raises:
        WorkerError: the group did not form.
    """

    def __init__(
        self, address: tuple[str, int], *, rank: int, size: int, layout: list[WeightSpec], dtype: torch.dtype,
        device: torch.device, bucket_bytes: int, timeout: float,
    ):  # fmt: skip
        self.rank, self.dtype, self.device, self.timeout = rank, dtype, device, timeout
        self.buckets = cut(layout, bucket_bytes // dtype.itemsize)
        try:
            store = dist.TCPStore(*address, size, rank == 0, timedelta(seconds=timeout))
            self._group = self._make_group(store, size)
            # Connect now, so that an unreachable address shows at the start of a run.
            self._start()
            self._finish(self._broadcast(torch.zeros(1, device=self.device)))
        except RuntimeError as error:
            raise WorkerError(f"the group for weights did not form at {address[0]}:{address[1]}: {error}") from error

    def _make_group(self, store: Any, size: int) -> Any:
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout + ABORT_SECONDS)
            return dist.ProcessGroupNCCL(dist.PrefixStore("weights", store), self.rank, size, options)
        return dist.ProcessGroupGloo(store, self.rank, size, timedelta(seconds=self.timeout))

    @torch.no_grad()
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Broadcast all weights; while a bucket travels the next one is packed.

        Args:
            weights: full tensors under their names, in the order of the layout.

        Raises:
            WorkerError: a receiver is gone, or did not take all weights within the timeout.
        """
        self._start()
        stream = iter(weights)
        on_their_way: deque[Any] = deque()
        for bucket in self.buckets:
            packed = torch.empty(sum(spec.length for spec in bucket), dtype=self.dtype, device=self.device)
            for spec, part in zip(bucket, packed.split([spec.length for spec in bucket]), strict=True):
                for name in spec.names:
                    found, tensor = next(stream)
                    assert found == name, (found, name)
                part.copy_(tensor.reshape(-1))
            on_their_way.append(self._broadcast(packed))
            if len(on_their_way) > 1:
                self._finish(on_their_way.popleft())
        for work in on_their_way:
            self._finish(work)

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The full weights under all their names, in order; the next bucket travels while one is used.

        No memory is used twice: the engine may keep a tensor for as long as it likes.

        Raises:
            WorkerError: the sender is gone, or did not send all weights within the timeout.
        """
        self._start()
        coming: deque[tuple[Tensor, Any]] = deque()
        waiting = iter(self.buckets)
        for bucket in self.buckets:
            while len(coming) < 2 and (following := next(waiting, None)) is not None:
                packed = torch.empty(sum(spec.length for spec in following), dtype=self.dtype, device=self.device)
                coming.append((packed, self._broadcast(packed)))
            packed, work = coming.popleft()
            self._finish(work)
            for spec, part in zip(bucket, packed.split([spec.length for spec in bucket]), strict=True):
                yield from ((name, part.view(spec.shape)) for name in spec.names)

    def _start(self) -> None:
        self._deadline = time.monotonic() + self.timeout

    def _broadcast(self, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        return self._group.broadcast([tensor], options)

    def _finish(self, work: Any) -> None:
        while not work.is_completed():
            if time.monotonic() > self._deadline:
                self._group.abort()
                raise WorkerError(f"weights were not passed on within {self.timeout:g} s: a worker of the group hangs")
            time.sleep(POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:  # torch's own types, of both backends
            raise WorkerError(f"weights were not passed on: {str(error).splitlines()[0]}") from error

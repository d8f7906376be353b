"""A sharded model trained on a token-level loss: gradient accumulation, optimizer steps, means over ranks.

Subclasses define the loss; the actor's is in actor.py. All methods are collective, as in sharded_model.py.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_gkd.errors import TrainingError
from hybrid_gkd.student.sharded_model import ShardedModel
from hybrid_gkd.types import MiniBatch, Sample, TokenMean


class DeviceTimer:
    """Measures device time of blocks of code without synchronizing."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds = defaultdict[str, float](float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the context, from its first device operation to the end of its last; nothing on an exception."""
        if self._on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Wait for the device; return seconds by name since the last call."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return seconds


class TrainedModel(ShardedModel):
    """One rank of a model with its loss. `ShardedModel` gets all other arguments and raises its errors.

    Args:
        grad_clip: largest global gradient norm.
        seed: seed of architectures that draw random numbers.
    """

    prefix: str
    """Prefix of the metrics: `<prefix>/grad_norm`."""
    loss_name: str
    """Name of the minimized metric."""

    def __init__(self, *args: Any, grad_clip: float, seed: int, **kwargs: Any):
        self.grad_clip, self.seed = grad_clip, seed
        self._sums: dict[str, Tensor] = {}
        """Sums of the metrics over the micro-batches since the last step."""
        super().__init__(*args, seed=seed, **kwargs)
        self.timer = DeviceTimer(self.device)
        """Timer of "compute" (forward and backward passes) and "optimizer_step" (including gradient clipping)."""

    def _loss(self, micro_batch: tuple[Sample, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return sums over a micro-batch's trained tokens: the loss, and metrics and token counts by name."""
        raise NotImplementedError

    def _reported(self) -> dict[str, str | None]:
        """Return all metrics with the name of their token count (None: all trained tokens).

        The result is the same on every rank, also on one with only empty micro-batches.
        """
        raise NotImplementedError

    def update(
        self, batch: MiniBatch, *, around_last: contextlib.AbstractContextManager[None] | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Take an optimizer step on a mini-batch, or on the last part of one whose other parts were accumulated.

        The loss is the sum over trained tokens divided by their number in the mini-batch over all ranks, so it does not
        depend on the split into micro-batches and ranks. Returns metrics of the whole mini-batch, equal on all ranks.

        Args:
            batch: this rank's micro-batches; `num_tokens` counts the whole mini-batch.
            around_last: context of the forward and backward pass of the last micro-batch.
            before_step: called between the last backward pass and the optimizer step.

        Raises:
            TrainingError: loss or gradient is not finite; no weight has changed.
            torch.OutOfMemoryError: out of device memory; no weight has changed.
            DeviceMemoryError: see `step`.
        """
        self.accumulate(batch, around_last=around_last or contextlib.nullcontext())
        sums, self._sums = self._sums, {}  # reset first: a retry after a failure must start from zero
        with self.timer.measure("optimizer_step"):
            grad_norm = self.clip_grad_norm(self.grad_clip)
        metrics = self._all_reduce(sums, batch.num_tokens)  # waits for the device, after all work is queued
        loss, norm = metrics[self.loss_name], float(grad_norm)
        if not math.isfinite(norm) or not math.isfinite(loss):
            step = self.updates_done + 1
            raise TrainingError(f"optimizer step {step}: loss {loss}, gradient norm {norm}; the step was not taken")
        before_step()
        with self.timer.measure("optimizer_step"):
            rate = self.step()
        return metrics | {f"{self.prefix}/grad_norm": norm, f"{self.prefix}/lr": rate}

    def accumulate(
        self, batch: MiniBatch, *, around_last: contextlib.AbstractContextManager[None] | None = None
    ) -> None:
        """Accumulate the gradients of a part of a mini-batch; the last part goes to `update`.

        `around_last`: context of the last micro-batch of the mini-batch; only for its last part.

        Raises torch.OutOfMemoryError; the gradients of earlier parts are lost too.
        """
        sums = self._sums
        if not sums:
            assert self.optimizer is not None
            self.optimizer.zero_grad()
            self._seed()
        try:
            with self.timer.measure("compute"):
                self._add_gradients(batch, sums, around_last)
        except torch.OutOfMemoryError:
            self.discard_gradients()
            raise

    def discard_gradients(self) -> None:
        """Drop the accumulated parts of a mini-batch."""
        self._sums = {}
        self.abandon_backward()

    def _add_gradients(
        self, batch: MiniBatch, sums: dict[str, Tensor], around_last: contextlib.AbstractContextManager[None] | None
    ) -> None:
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            around = around_last if number == len(batch.micro_batches) else None
            last = around is not None
            if not self.fsdp.reshard_after_forward:  # gathered weights serve the next micro-batch too
                self.model.set_reshard_after_backward(last)
            if self.world_size == 1:  # a single rank has full gradients: reduce only once
                self.model.set_requires_gradient_sync(last)
            with around or contextlib.nullcontext():
                loss_sum, parts = self._loss(micro_batch)
                # FSDP2 averages gradients over ranks; the loss is a sum over them.
                (loss_sum * (self.world_size / batch.num_tokens)).backward()
            for name, value in (parts | {self.loss_name: loss_sum.detach()}).items():
                sums[name] = sums[name] + value if name in sums else value

    def _seed(self) -> None:
        """Seed architectures that draw random numbers (PhiMoE's router), reproducibly after a resume."""
        torch.manual_seed(self.seed + self.updates_done)

    def _all_reduce(self, sums: dict[str, Tensor], num_tokens: int) -> dict[str, float]:
        """Reduce this rank's sums over micro-batches to `TokenMean` over the counted tokens of all ranks.

        A metric without tokens is omitted.
        """
        reported = self._reported()
        names = list(dict.fromkeys([*reported, *(count for count in reported.values() if count)]))
        stacked = torch.stack([sums.get(name, torch.zeros((), device=self.device)).double() for name in names])
        if self.world_size > 1:  # NCCL would allocate 0.4 GiB even for a single rank
            dist.all_reduce(stacked)
        means = dict(zip(names, (stacked / num_tokens).tolist(), strict=True))
        counts = {name: means[count] if count else 1.0 for name, count in reported.items()}
        return {n: TokenMean(means[n] / count, count * num_tokens) for n, count in counts.items() if count}

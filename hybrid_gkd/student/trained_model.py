"""A sharded model that is trained on a loss per token: gradients of parts, optimizer steps, means over ranks.

What the loss is, a subclass says: the actor's is in actor.py. All methods are collective, as in sharded_model.py.
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
    """Adds up how long a device takes for what blocks of code give it to do, without waiting for it."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._seconds = defaultdict[str, float](float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """From the first piece of work of the block to the end of its last; not of one that raises."""
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
        """Seconds by name since the last call, when the device has done all of it."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        seconds, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return seconds


class TrainedModel(ShardedModel):
    """One rank of a model with its loss. Raises as `ShardedModel`, which gets all other arguments.

    Args:
        grad_clip: largest global gradient norm.
        seed: of the random numbers that some architectures draw.
    """

    prefix: str
    """Of its metrics: `<prefix>/grad_norm`."""
    loss_name: str
    """The metric that is minimised."""

    def __init__(self, *args: Any, grad_clip: float, seed: int, **kwargs: Any):
        self.grad_clip, self.seed = grad_clip, seed
        self._sums: dict[str, Tensor] = {}
        """Of the metrics, over the micro-batches since the last step."""
        super().__init__(*args, seed=seed, **kwargs)
        self.timer = DeviceTimer(self.device)
        """Of "compute", forward and backward passes, and "optimizer_step" with the clipping of gradients."""

    def _loss(self, micro_batch: tuple[Sample, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sums over the trained tokens of a micro-batch: of the loss, of the metrics by name, and of `_reported`."""
        raise NotImplementedError

    def _reported(self) -> dict[str, str | None]:
        """Names of all metrics -> the sum that says how many tokens a metric is of, None: all trained tokens.

        The same on every rank, also on one that had only empty micro-batches.
        """
        raise NotImplementedError

    def update(
        self, batch: MiniBatch, *, around_last: contextlib.AbstractContextManager[None] | None = None,
        before_step: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch, or on the last part of one whose other parts were accumulated.

        The loss is the sum over trained tokens divided by their number in the mini-batch over all ranks, so that the
        cut into micro-batches and ranks does not matter. Returns metrics of the whole mini-batch, equal on all ranks.

        Args:
            batch: this rank's share; `num_tokens` is of the whole mini-batch.
            around_last: entered for the forward and backward pass of the last micro-batch.
            before_step: called between the last backward pass and the optimizer step.

        Raises:
            TrainingError: the gradient is not finite; no weight has changed.
            torch.OutOfMemoryError: the device memory did not suffice; no weight has changed.
            DeviceMemoryError: see `step`.
        """
        self.accumulate(batch, around_last=around_last or contextlib.nullcontext())
        sums, self._sums = self._sums, {}  # now: a new attempt after a failure must begin anew
        with self.timer.measure("optimizer_step"):
            grad_norm = self.clip_grad_norm(self.grad_clip)
        metrics = self._all_reduce(sums, batch.num_tokens)  # waits for the device, which has been given all work by now
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
        """Add the gradients of a part of a mini-batch; its last part goes to `update`.

        `around_last` is the last part's: entered for its last micro-batch, after which nothing follows.

        Raises torch.OutOfMemoryError; the gradients of earlier parts are gone too.
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
            self._sums = {}
            self.abandon_backward()
            raise

    def _add_gradients(
        self, batch: MiniBatch, sums: dict[str, Tensor], around_last: contextlib.AbstractContextManager[None] | None
    ) -> None:
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            around = around_last if number == len(batch.micro_batches) else None
            last = around is not None
            if not self.fsdp.reshard_after_forward:  # weights that stay gathered serve the next micro-batch too
                self.model.set_reshard_after_backward(last)
            if self.world_size == 1:  # the rank has whole gradients anyway: only their sum is reduced, to itself
                self.model.set_requires_gradient_sync(last)
            with around or contextlib.nullcontext():
                loss_sum, parts = self._loss(micro_batch)
                # FSDP2 averages gradients over ranks; the loss is a sum over them.
                (loss_sum * (self.world_size / batch.num_tokens)).backward()
            self._add(sums, parts | {self.loss_name: loss_sum.detach()})

    def _add(self, sums: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            sums[name] = sums.get(name, torch.zeros((), device=self.device)) + value

    def _seed(self) -> None:
        """Some architectures draw random numbers (PhiMoE's router): the same ones after a resume."""
        torch.manual_seed(self.seed + self.updates_done)

    def _all_reduce(self, sums: dict[str, Tensor], num_tokens: int) -> dict[str, float]:
        """Sums over micro-batches of this rank -> means over the tokens of all ranks that a metric is of, TokenMean.

        A metric that is of no token is left out.
        """
        reported = self._reported()
        names = list(dict.fromkeys([*reported, *(count for count in reported.values() if count)]))
        stacked = torch.stack([sums.get(name, torch.zeros((), device=self.device)).double() for name in names])
        if self.world_size > 1:  # for a single rank NCCL would take 0.4 GiB to do nothing
            dist.all_reduce(stacked)
        means = dict(zip(names, (stacked / num_tokens).tolist(), strict=True))
        shares = {name: means[count] if count else 1.0 for name, count in reported.items()}
        return {n: TokenMean(means[n] / share, share * num_tokens) for n, share in shares.items() if share}

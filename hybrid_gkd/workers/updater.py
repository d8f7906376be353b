"""Update a model on a shared device: enter its phases, and retry with smaller micro-batches if memory runs out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from hybrid_gkd.errors import DeviceMemoryError, WorkerError
from hybrid_gkd.offload.residency import Residency
from hybrid_gkd.types import MiniBatch, Sample
from hybrid_gkd.workers.device import MemoryMeter

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Phases:
    """Phases of the residency in which a model is trained."""

    update: str
    """Phase of forward and backward passes."""
    step: str
    """Phase of the optimizer step."""
    afterwards: str
    """Phase after an update, whose copies begin in advance."""


PHASES = {
    "actor": Phases("update", "optimizer_step", "rollout"),
    "critic": Phases("critic_update", "critic_optimizer_step", "update"),
    **{name: Phases(name, name, "update") for name in ("reference", "reward_model", "ema_teacher")},
}
"""Phases by model; the last ones take no optimizer steps."""


class Updater:
    """Runs a model's forward and backward passes and optimizer steps.

    If memory runs out and the worker is `alone` in its pool, the mini-batch is repeated with micro-batches of half the
    size; in a larger pool that is impossible, since the other workers wait in collectives. `worker`: name for messages.
    `model`: a `TrainedModel`, or a model of which only `forward` is used.
    """

    def __init__(
        self, model: Any, residency: Residency, meter: MemoryMeter, *, worker: str, alone: bool,
        phases: Phases = PHASES["actor"],
    ):  # fmt: skip
        self.model, self.residency, self.meter = model, residency, meter
        self.worker, self.alone, self.phases = worker, alone, phases
        self._peak_activation_bytes = 0
        """Peak of all mini-batches so far beyond parameters and optimizer state, gradients included."""
        self._largest_micro_batch = 0
        """Tokens of the largest micro-batch of that peak."""
        self._accumulated: tuple[tuple[Sample, ...], ...] = ()
        """Micro-batches in the present gradients, kept until the optimizer step."""
        self._failed = False
        """True after a part has failed: later parts, which may already be queued, must not be trained without it."""
        self._copy_seconds = 0.0

    def accumulate(self, part: MiniBatch) -> None:
        """Run forward and backward of a part of a mini-batch, whose last part goes to `update`. Raises as `update`."""
        with self._next_part():
            self._attempt(self.model.accumulate, part, again=self.alone)

    def update(self, batches: list[MiniBatch], *, last: bool = True) -> list[dict[str, float]]:
        """Take one optimizer step per mini-batch; return the metrics of each, equal on all ranks.

        `last`: no further mini-batch of this rollout follows, so that memory for the next phase is copied in advance.

        The optimizer state is copied block by block during the last backward pass, as far as the peak activation memory
        allows; memory owners that the rollout does not need are copied at the end.

        Raises:
            DeviceMemoryError: the micro-batches do not fit, and no weight has changed; or the optimizer step does not
                fit, and some weights may have changed.
            WorkerError: an accumulated part has failed.
        """
        metrics = []
        for batch in batches:
            with self._next_part():
                metrics.append(self._attempt(self._update, batch, again=self.alone))
            self._accumulated = ()
        if last and self.residency.has_movable_owners:
            self.meter.trim()  # now, since it would wait for copies in flight
        if last:
            self.residency.prepare(self.phases.afterwards)
        return metrics

    def discard(self) -> None:
        """Drop the accumulated parts of a mini-batch whose last part will not come."""
        if self._accumulated:
            self._accumulated = ()
            self.model.discard_gradients()

    @contextlib.contextmanager
    def _next_part(self) -> Iterator[None]:
        if self._failed:
            raise WorkerError(f"{self.worker}: an earlier part of the update has failed")
        self._failed = True
        yield
        self._failed = False

    def forward(self, compute: Callable[[], T]) -> T:
        """Call `compute`, which only runs forward passes. Raises DeviceMemoryError if a micro-batch does not fit."""
        self.residency.enter(self.phases.update)
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(str(error).splitlines()[0]) from error

    def _attempt(self, compute: Callable[[MiniBatch], T], part: MiniBatch, *, again: bool) -> T:
        """Call `compute` with a part; if memory runs out, and `again`, repeat the mini-batch so far in halves."""
        whole = dataclasses.replace(part, micro_batches=(*self._accumulated, *part.micro_batches))
        try:
            self._enter(self.phases.update, **self._kept_from_last_step(part))
            if not self._accumulated:
                self.meter.start()
            result = compute(part)
            self._accumulated = whole.micro_batches
            return result
        except torch.OutOfMemoryError as error:
            halves, reason = split_micro_batches(whole), str(error).splitlines()[0]
        # The activations of the failed attempt are freed here, after its exception is gone.
        if not again or halves is None:
            raise self._out_of_memory(reason)
        logger.warning("retrying with micro-batches of half the size: %s", reason)
        self._accumulated = ()
        self._enter(self.phases.update)
        self.meter.trim()
        return self._attempt(compute, halves, again=False)

    def _peak_bytes(self, tokens: int) -> int:
        """Return the expected peak of a mini-batch whose largest micro-batch has `tokens` tokens; 0: unknown.

        A larger micro-batch than before may need more by the same factor.
        """
        if not self._largest_micro_batch:
            return 0
        return round(self._peak_activation_bytes * max(1.0, tokens / self._largest_micro_batch))

    def _kept_from_last_step(self, part: MiniBatch) -> dict[str, Any]:
        """Return the arguments of `Residency.enter` that keep the optimizer state from one step to the next."""
        peak = self._peak_bytes(largest_micro_batch(part.micro_batches))
        present = self.meter.present() if self._accumulated else 0
        return {"beside": self.phases.step, "reserve": peak - present} if peak else {}

    def _update(self, batch: MiniBatch) -> dict[str, float]:
        tokens = largest_micro_batch((*self._accumulated, *batch.micro_batches))
        arriving = 0

        @contextlib.contextmanager
        def around_last() -> Iterator[None]:
            """Copy the optimizer state in pieces, since copies that a pass needs wait for all queued before."""
            if not self._largest_micro_batch or not self.residency.missing(self.phases.step):
                yield
                return
            before, reserve = self.meter.present(), -1

            def before_backward(left: int) -> None:
                nonlocal arriving, reserve
                taken = self.meter.taken() - arriving
                self._peak_activation_bytes = max(self._peak_activation_bytes, taken)
                if reserve < 0:
                    reserve = self._peak_bytes(tokens) - (self.meter.present() - before)
                most = -(-self.residency.missing(self.phases.step) // left)
                arriving += self.residency.prepare(self.phases.step, reserve=reserve, most=most)

            with self.model.before_each_backward(before_backward):
                yield

        def before_step() -> None:
            self._peak_activation_bytes = max(self._peak_activation_bytes, self.meter.taken() - arriving)
            self._largest_micro_batch = max(self._largest_micro_batch, tokens)
            self._enter(self.phases.step)

        return self.model.update(batch, around_last=around_last(), before_step=before_step)

    def _enter(self, phase: str, **options: Any) -> None:
        started = time.perf_counter()
        self.residency.enter(phase, **options)
        self._copy_seconds += time.perf_counter() - started

    def take_seconds(self) -> dict[str, float]:
        """Return seconds since the last call: those of the model's `timer`, and "copies" that updates waited for."""
        copies, self._copy_seconds = self._copy_seconds, 0.0
        return {**self.model.timer.take(), "copies": copies}

    def _out_of_memory(self, reason: str) -> DeviceMemoryError:
        here, section = self.phases.update, self.model.section
        owners = {t: b for (phase, t), b in self.residency.bytes_by_phase().items() if phase == here}
        sizes = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sorted(owners.items()))
        return DeviceMemoryError(
            f"phase {here}: {self.worker} ran out of device memory, of which {sizes} are in use; the last checkpoint "
            f"is intact. Lower {section}.{self.model.token_limit}, enable "
            "actor_rollout_ref.model.enable_gradient_checkpointing or an offload, or lower the gpu_memory_utilization "
            f"of vLLM or a teacher on this GPU. {reason}"
        )


def largest_micro_batch(micro_batches: tuple[tuple[Sample, ...], ...]) -> int:
    """Return the tokens of the largest micro-batch."""
    return max((sum(sample.num_tokens for sample in each) for each in micro_batches), default=0)


def split_micro_batches(batch: MiniBatch) -> MiniBatch | None:
    """Return the same mini-batch in micro-batches of half as many samples; None if none can be split."""
    if all(len(micro_batch) < 2 for micro_batch in batch.micro_batches):
        return None
    halves: list[tuple[Sample, ...]] = []
    for micro_batch in batch.micro_batches:
        middle = -(-len(micro_batch) // 2)
        halves += [part for part in (micro_batch[:middle], micro_batch[middle:]) if part]
    return dataclasses.replace(batch, micro_batches=tuple(halves))

"""Rollout scheduling: how many batches generation runs ahead of the update, for one pool of workers and for two."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.waiting import Timeout
from hybrid_gkd.types import Rollout

CHECK_SECONDS = 1.0
"""Seconds between two checks of the deadline while waiting for a rollout."""


class RolloutPipeline:
    """Yields the rollouts of a run in the order of their steps, each generated with the newest published weights.

    Args:
        generate: step -> its rollout.
        depth: number of batches that generation runs ahead of the update: the largest staleness.
        in_background: generate in a background thread, so that generation and update overlap; otherwise alternate.
        inactivity_timeout: longest time without `progress` for a generation in the background.
        clock: records the spans `wait_prev_gen`.
    """

    def __init__(
        self, generate: Callable[[int], Rollout], *, depth: int, in_background: bool, inactivity_timeout: Timeout,
        clock: Clock,
    ):  # fmt: skip
        self._generate = generate
        self.depth = depth
        self._in_background = in_background
        self._inactivity_timeout = inactivity_timeout
        self._clock = clock
        self._last_progress = 0.0
        self._running: list[Future[Rollout]] = []
        """Generations running in the background, in order."""

    def __call__(self, first: int, last: int) -> Iterator[Rollout]:
        """Yield the rollouts of steps `first` to `last`. Raises the errors of `generate`, and WorkerError on a timeout.

        A resumed run regenerates the prefetched batches: a rollout is a function of its data position and the weights.
        """
        prefetched: deque[Rollout | Future[Rollout]] = deque()
        for step in range(first, last + 1):
            steps = range(step + len(prefetched), min(step + self.depth, last) + 1)
            prefetched += self._start(steps) if self._in_background else [self._generate(later) for later in steps]
            rollout = prefetched.popleft()
            yield self._wait_for(rollout) if isinstance(rollout, Future) else rollout

    def progress(self) -> None:
        """Reset the inactivity timeout."""
        self._last_progress = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend the inactivity timeout during a wait that has its own deadline."""
        self._last_progress = math.inf
        try:
            yield
        finally:
            self.progress()

    def finish(self) -> None:
        """Wait until all generations are done, so that weights may be updated. Raises the errors of the iterator."""
        while self._running:
            self._wait_for(self._running[0])
            self._running.pop(0)

    def _start(self, steps: range) -> list[Future[Rollout]]:
        """Generate the rollouts of `steps` one after the other in a background thread."""
        futures: list[Future[Rollout]] = [Future() for _ in steps]

        def work() -> None:
            for number, step in enumerate(steps):
                try:
                    futures[number].set_result(self._generate(step))
                except BaseException as error:  # raised in the waiting thread; later rollouts cannot follow
                    for future in futures[number:]:
                        future.set_exception(error)
                    return

        self._running += futures
        self.progress()
        # A daemon thread, because a failed run must not wait for it; it ends with the workers.
        threading.Thread(target=work, name="generate", daemon=True).start()
        return futures

    def _wait_for(self, rollout: Future[Rollout]) -> Rollout:
        with self._clock.span("wait_prev_gen"):
            while not wait([rollout], timeout=CHECK_SECONDS).done:
                if time.monotonic() > self._last_progress + self._inactivity_timeout.seconds:
                    raise WorkerError(
                        f"no completion and no error within {self._inactivity_timeout} during the generation; see the "
                        "logs of the rollout workers"
                    )
        return rollout.result()

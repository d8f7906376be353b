"""How far generation runs ahead of the update: one mechanism with a depth, for one pool of workers and for two."""

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
"""How often a wait for a rollout looks at its deadline."""


class RolloutsAhead:
    """The rollouts of a run in the order of their steps, each generated with the newest published weights.

    Args:
        generate: step -> its rollout.
        depth: how many batches generation runs ahead of the update, and so the largest staleness.
        in_background: generate in a background thread, so that generation and update overlap; otherwise they take
            turns.
        inactivity_timeout: that a generation in the background may go on without `progress`.
        clock: gets the spans `wait_prev_gen`.
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
        """Generations in the background, in their order."""

    def __call__(self, first: int, last: int) -> Iterator[Rollout]:
        """Yield the rollouts of the steps from `first` to `last`. Raises the errors of `generate`, and WorkerError.

        A resumed run generates the batches anew that were ahead: a rollout is a function of its place in the data and
        the weights.
        """
        ahead: deque[Rollout | Future[Rollout]] = deque()
        for step in range(first, last + 1):
            steps = range(step + len(ahead), min(step + self.depth, last) + 1)
            ahead += self._start(steps) if self._in_background else [self._generate(later) for later in steps]
            rollout = ahead.popleft()
            yield self._wait_for(rollout) if isinstance(rollout, Future) else rollout

    def progress(self) -> None:
        """The generation goes on."""
        self._last_progress = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what a generation waits for that has a deadline of its own."""
        self._last_progress = math.inf
        try:
            yield
        finally:
            self.progress()

    def finish(self) -> None:
        """Wait until nothing is generated: then the engine's weights may change. Raises as the iterator."""
        while self._running:
            self._wait_for(self._running[0])
            self._running.pop(0)

    def _start(self, steps: range) -> list[Future[Rollout]]:
        """Generate the rollouts of these steps in a background thread, one after the other."""
        futures: list[Future[Rollout]] = [Future() for _ in steps]

        def work() -> None:
            for number, step in enumerate(steps):
                try:
                    futures[number].set_result(self._generate(step))
                except BaseException as error:  # for the thread that waits; without this one there are no later ones
                    for future in futures[number:]:
                        future.set_exception(error)
                    return

        self._running += futures
        self.progress()
        # A daemon, because a run that fails must not wait for it: it ends with the workers.
        threading.Thread(target=work, name="generate", daemon=True).start()
        return futures

    def _wait_for(self, rollout: Future[Rollout]) -> Rollout:
        with self._clock.span("wait_prev_gen"):
            while not wait([rollout], timeout=CHECK_SECONDS).done:
                if time.monotonic() > self._last_progress + self._inactivity_timeout.seconds:
                    raise WorkerError(f"generate: no response and no error in {self._inactivity_timeout}")
        return rollout.result()

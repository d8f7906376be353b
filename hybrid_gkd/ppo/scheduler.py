"""How far generation runs ahead of the update: one mechanism with a depth, for one pool of workers and for two."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.spans import Clock
from hybrid_gkd.types import Rollout

CHECK_SECONDS = 1.0
"""How often a wait for a rollout looks at its deadline."""


class RolloutsAhead:
    """The rollouts of a run in the order of their steps, generated with the weights that there are at the time.

    Args:
        generate: step -> its rollout.
        depth: how many later rollouts have been asked for when one is handed out, and so the largest staleness.
        beside: generate in a thread, beside what is done with the rollout before. Otherwise generation and the rest
            take turns.
        patience: seconds that a generation may go on without `news`.
        clock: gets the spans `wait_prev_gen`.
    """

    def __init__(
        self, generate: Callable[[int], Rollout], *, depth: int, beside: bool, patience: float, clock: Clock
    ):
        self._generate = generate
        self._depth = depth
        self._beside = beside
        self._patience = patience
        self._clock = clock
        self._last_news = 0.0
        self._running: list[Future[Rollout]] = []
        """What runs beside, in the order in which it is generated."""

    def __call__(self, first: int, last: int) -> Iterator[Rollout]:
        """Yield the rollouts of the steps from `first` to `last`. Raises what `generate` raised, and WorkerError.

        A run that resumes generates anew what was ahead: a rollout is a function of its step and the weights.
        """
        ahead: deque[Rollout | Future[Rollout]] = deque()
        for step in range(first, last + 1):
            steps = range(step + len(ahead), min(step + self._depth, last) + 1)
            ahead += self._start(steps) if self._beside else [self._generate(later) for later in steps]
            rollout = ahead.popleft()
            yield self._wait_for(rollout) if isinstance(rollout, Future) else rollout

    def news(self) -> None:
        """The generation goes on."""
        self._last_news = time.monotonic()

    def finish(self) -> None:
        """Wait until nothing is generated: then the engine's weights may change. Raises as the iterator."""
        while self._running:
            self._wait_for(self._running[0])
            self._running.pop(0)

    def _start(self, steps: range) -> list[Future[Rollout]]:
        """Generate the rollouts of these steps in a thread, one after the other."""
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
        self.news()
        # A daemon, because a run that fails must not wait for it: it ends with the workers.
        threading.Thread(target=work, name="generate", daemon=True).start()
        return futures

    def _wait_for(self, rollout: Future[Rollout]) -> Rollout:
        with self._clock.span("wait_prev_gen"):
            while not wait([rollout], timeout=CHECK_SECONDS).done:
                if time.monotonic() > self._last_news + self._patience:
                    raise WorkerError(f"generate: no response and no error in {self._patience:.0f} s")
        return rollout.result()

"""Schedule of snapshots: copies of the training state, from which lost workers are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable

from hybrid_gkd.ppo.checkpoint_writer import CheckpointWriter
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.student.checkpoint_store import CheckpointStore, TrainerState

MAX_OVERHEAD = 0.02
"""Largest fraction of the training time that snapshots take with `trainer.snapshot_freq=null`."""


class Snapshots:
    """Takes snapshots every `trainer.snapshot_freq` steps; null: when their cost is below `MAX_OVERHEAD`.

    It does nothing while `saving.snapshots` is None. Steps with a checkpoint, and steps during which an earlier state
    is still being written, are skipped.

    Args:
        every: `trainer.snapshot_freq`.
        saving: writes checkpoints into `store`, and snapshots.
        state, continues: return the trainer's state, and whether a step follows.
    """

    def __init__(
        self, every: int | None, saving: CheckpointWriter, store: CheckpointStore, clock: Clock, *,
        state: Callable[[], TrainerState], continues: Callable[[], bool],
    ):  # fmt: skip
        self._every, self._saving, self._store, self._clock = every, saving, store, clock
        self._state, self._continues = state, continues
        self._seconds, self._taken_at = 0.0, time.monotonic()
        """Cost of the last snapshot, and when it was taken."""

    def poll(self) -> None:
        """Before an update, complete the snapshot of the previous step if its files are written."""
        if self._saving.snapshots is not None and self._saving.poll() and self._continues():
            self._store.reserve()

    def take(self, step: int) -> None:
        """After the update of a step, before its weights are published, copy the state to the host."""
        self.poll()
        began, saving = time.monotonic(), self._saving
        busy = saving.snapshots is None or saving.is_writing or saving.copied_for is not None
        if not busy and self._is_due(step, began) and self._continues():
            with self._clock.span("snapshot"):
                saving.take_snapshot(saving.snapshots)
            self._seconds, self._taken_at = time.monotonic() - began, began

    def _is_due(self, step: int, now: float) -> bool:
        if self._every is not None:
            return step % self._every == 0
        return self._seconds <= MAX_OVERHEAD * (now - self._taken_at)

    def start(self) -> None:
        """At the end of a step, start to write the copy, unless a checkpoint has taken its place."""
        began = time.monotonic()
        if self._saving.snapshots is not None and self._saving.copied_for is self._saving.snapshots:
            self._saving.start(self._state())
            self._seconds += time.monotonic() - began

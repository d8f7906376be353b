"""Schedule of snapshots: copies of the training state, from which lost workers are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable

from hybrid_gkd.config import TrainerConfig
from hybrid_gkd.ppo.checkpoint_writer import CheckpointWriter
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.student.checkpoint_store import CheckpointStore, TrainerState, prepare_snapshots

MAX_OVERHEAD = 0.02
"""Largest fraction of the training time that snapshots take with `trainer.snapshot_freq=null`."""


class NoSnapshots:
    """Takes no snapshots."""

    def poll(self) -> None:
        """Before an update, complete the snapshot of the previous step if its files are written."""

    def take(self, step: int) -> None:
        """After the update of a step, before its weights are published, copy the state to the host."""

    def start(self) -> None:
        """At the end of a step, start to write the copy, unless a checkpoint of the step is being written."""


class Snapshots(NoSnapshots):
    """Takes snapshots every `trainer.snapshot_freq` steps; null: when their cost is below `MAX_OVERHEAD`.

    Steps with a checkpoint, and steps during which an earlier state is still being written, are skipped.

    Args:
        config: the section `trainer`.
        saving: writes the checkpoints, into `store`.
        state, continues: return the trainer's state, and whether a step follows.

    Raises CheckpointError: the folder cannot be created.
    """

    def __init__(
        self, config: TrainerConfig, saving: CheckpointWriter, store: CheckpointStore, clock: Clock, *,
        state: Callable[[], TrainerState], continues: Callable[[], bool],
    ):  # fmt: skip
        self._every, self._saving, self._store, self._clock = config.snapshot_freq, saving, store, clock
        self._state, self._continues = state, continues
        self._saving.snapshots = prepare_snapshots(store.run_dir, config.snapshot_dir)
        self._is_taken = False
        self._seconds, self._taken_at = 0.0, time.monotonic()
        """Cost of the last snapshot, and when it was taken."""

    def poll(self) -> None:
        if self._saving.poll() and self._continues():
            self._store.reserve()

    def take(self, step: int) -> None:
        self.poll()
        began, busy = time.monotonic(), self._saving.is_writing or self._saving.has_snapshot
        self._is_taken = self._is_due(step, began) and not busy and self._continues()
        if self._is_taken:
            with self._clock.span("snapshot"):
                self._saving.take_snapshot(exports=False)
            self._seconds, self._taken_at = time.monotonic() - began, began

    def _is_due(self, step: int, now: float) -> bool:
        if self._saving.snapshots is None:
            return False
        if self._every is not None:
            return step % self._every == 0
        return self._seconds <= MAX_OVERHEAD * (now - self._taken_at)

    def start(self) -> None:
        began = time.monotonic()
        if self._is_taken and not self._saving.is_writing and self._saving.snapshots is not None:
            self._saving.start(self._state(), self._saving.snapshots)
            self._seconds += time.monotonic() - began

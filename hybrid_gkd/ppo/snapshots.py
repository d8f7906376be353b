"""When a run takes snapshots: states of its workers, from which lost ones are replaced."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hybrid_gkd.student.checkpoint_store import prepare_snapshots

if TYPE_CHECKING:
    from hybrid_gkd.ppo.trainer import PPOTrainer

SHARE = 0.02
"""Largest fraction of the time for snapshots, with `trainer.snapshot_freq=null`."""


class NoSnapshots:
    """None are taken."""

    def poll(self) -> None:
        """Before an update: let the snapshot of the last step become complete, if it is written."""

    def take(self) -> None:
        """After an update, before its weights are published: copy the state to the host."""

    def start(self) -> None:
        """At the end of a step: begin to write the copy, unless a checkpoint of the step is being written."""


class Snapshots(NoSnapshots):
    """Takes snapshots every `trainer.snapshot_freq` steps; null: as often as their measured cost is below `SHARE`.

    A step is left out while an earlier state is being written, and if a checkpoint is due. Raises CheckpointError: the
    folder cannot be created.
    """

    def __init__(self, trainer: PPOTrainer):
        self._trainer, self._saving = trainer, trainer.saving
        self._every = trainer.config.trainer.snapshot_freq
        self._saving.snapshots = prepare_snapshots(trainer.store.run_dir, trainer.config.trainer.snapshot_dir)
        self._is_taken = False
        self._seconds, self._taken_at = 0.0, time.monotonic()
        """Cost of the last snapshot, and when it was taken."""

    def poll(self) -> None:
        if self._saving.poll() and self._trainer.continues():
            self._trainer.store.reserve()

    def take(self) -> None:
        self.poll()
        began, busy = time.monotonic(), self._saving.is_writing or self._saving.has_snapshot
        self._is_taken = self._is_due(began) and not busy and self._trainer.continues()
        if self._is_taken:
            with self._trainer.clock.span("snapshot"):
                self._saving.take_snapshot(exports=False)
            self._seconds, self._taken_at = time.monotonic() - began, began

    def _is_due(self, now: float) -> bool:
        if self._saving.snapshots is None:
            return False
        if self._every is not None:
            return self._trainer.step % self._every == 0
        return self._seconds <= SHARE * (now - self._taken_at)

    def start(self) -> None:
        began = time.monotonic()
        if self._is_taken and not self._saving.is_writing and self._saving.snapshots is not None:
            self._saving.start(self._trainer.state(), self._saving.snapshots)
            self._seconds += time.monotonic() - began

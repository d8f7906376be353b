"""Writing of checkpoints, at once or in the background, and of snapshots, from which lost workers are replaced."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_gkd.config import Config
from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.runtime.spans import Clock
from hybrid_gkd.runtime.threads import single_thread
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.student.checkpoint_store import SNAPSHOT, Best, CheckpointStore, TrainerState, step_in_name

if TYPE_CHECKING:
    from pathlib import Path

    from hybrid_gkd.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
"""Timeout of the last part of a checkpoint after a failure."""
MAX_OVERHEAD = 0.02
"""Largest fraction of the training time that snapshots take with `trainer.snapshot_freq=null`."""


@dataclass
class _PendingCheckpoint:
    """A checkpoint or snapshot that is being written in the background."""

    state: TrainerState
    store: CheckpointStore
    seconds: float = 0.0
    """Write time of the slowest worker."""
    completing: Future[None] | None = None
    """Future of the part after the workers' writes: flush and file list."""


class CheckpointWriter:
    """Writes checkpoints, one at a time.

    `write` blocks. Writing in the background has three parts: `take_snapshot` while weights and optimizer state are on
    the workers' devices, `start` with the trainer's state of that moment, and `poll` after each further step.
    """

    def __init__(self, config: Config, group: WorkerGroup, store: CheckpointStore):
        self._group, self._store = group, store
        model = config.actor_rollout_ref.model
        self._tokenizer_path = model.tokenizer_path or model.path
        self._timeout = Timeout(config.actor_rollout_ref.load_timeout, "actor_rollout_ref.load_timeout")
        self.newest: Path | None = None
        """Newest complete checkpoint that this run wrote or resumed from, after `step`."""
        self.step = 0
        self.best: Best | None = None
        """Best validation stored in `newest`; the checkpoint of a later best may have failed."""
        self.copied_for: CheckpointStore | None = None
        """Store for which the workers have a copy of their state that is not being written yet; None without one."""
        self.snapshots: CheckpointStore | None = None
        """Store of the run's snapshots; None if none are taken, or after one has failed."""
        self.snapshot: tuple[int, Path] | None = None
        """Step and folder of the newest complete snapshot that this run wrote or resumed from."""
        self._writing: _PendingCheckpoint | None = None
        self._thread = single_thread("checkpoint")

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def write(self, state: TrainerState) -> None:
        """Write a checkpoint and wait for it. Raises CheckpointError: it failed; earlier ones are intact."""
        self.finish()
        self.copied_for = None  # the workers drop it
        sums = dict[str, FileSum]()
        with self._store.writing(state, sums) as folder:
            sums |= self._group.save_checkpoint(folder, tokenizer_path=self._tokenizer_path)
        self.newest, self.step, self.best = self._store.folder(state.step), state.step, state.best

    def resume(self, folder: Path, state: TrainerState) -> None:
        """Record the checkpoint or snapshot that the run resumed from as the newest one. Raises CheckpointError."""
        self._store.abandon_after(state.step)
        self.newest, self.step = folder, state.step
        if folder.resolve().parent == (self._store.run_dir / SNAPSHOT).resolve():
            self.snapshot = state.step, folder
            self.newest = next((each for each in self._store.newest_first() if step_in_name(each) <= state.step), None)
            self.step = step_in_name(self.newest) if self.newest else 0
        if self.newest is not None and self.newest.resolve() == self._store.folder(self.step).resolve():
            self._store.continue_from(self.step)

    def take_snapshot(self, store: CheckpointStore | None = None) -> None:
        """Wait for the previous checkpoint, then copy the workers' present state.

        `store`: that of `snapshots`, which have no exports; None: of checkpoints.
        """
        self.finish()
        self._group.take_snapshot(tokenizer_path=self._tokenizer_path if store is None else None)
        self.copied_for = store or self._store

    def start(self, state: TrainerState) -> None:
        """Start to write the copy into its store, with the trainer's state of that time."""
        assert self.copied_for is not None
        pending, self.copied_for = _PendingCheckpoint(state, self.copied_for), None
        with self._failing(pending):
            self._group.write_snapshot(pending.store.begin(state.step))
            self._writing = pending

    def poll(self) -> bool:
        """Return whether the checkpoint being written, not a snapshot, is now complete. Raises as `finish`."""
        if (writing := self._writing) is None:
            return False
        with self._failing(writing):
            if writing.completing is None and self._group.snapshot_written():
                self._complete(writing)
        if writing.completing is None or not writing.completing.done():
            return False
        self.finish()
        return writing.store is self._store

    def finish(self) -> None:
        """Wait until the checkpoint or snapshot being written, if any, is complete.

        Raises CheckpointError: a checkpoint failed; earlier ones are intact. WorkerError: a worker is lost.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        with self._failing(writing):
            completing, step = writing.completing or self._complete(writing), writing.state.step
            try:
                with waiting(f"the files of the checkpoint of step {step} to be flushed", self._timeout):
                    completing.result(self._timeout.seconds)
            except TimeoutError:
                where = writing.store.folder(step)
                raise CheckpointError(f"cannot write checkpoint {where}: not complete within {self._timeout}") from None
            self._keep(writing)

    @contextlib.contextmanager
    def _failing(self, writing: _PendingCheckpoint) -> Iterator[None]:
        """Drop a checkpoint whose write fails in the block. After a failed snapshot, warn and take no further ones."""
        try:
            yield
        except Exception as error:
            self._writing = None
            if writing.store is self._store or not isinstance(error, CheckpointError):
                raise
            self.snapshots = None
            writing.store.remove_unfinished()
            logger.warning("no further snapshots are taken (trainer.snapshot_freq): %s", error)

    def settle(self) -> None:
        """After a failure, complete a checkpoint whose files are all written, within SETTLE_SECONDS."""
        writing, self._writing = self._writing, None
        if writing is None or writing.completing is None:
            return
        try:
            writing.completing.result(SETTLE_SECONDS)
        except Exception as error:
            logger.warning("the checkpoint of step %d is not complete: %r", writing.state.step, error)
        else:
            self._keep(writing)

    def newest_states(self) -> list[tuple[int, Path]]:
        """Return step and folder of the newest checkpoint and of the newest snapshot, the newer one first."""
        checkpoints = [(self.step, self.newest)] if self.newest is not None else []
        snapshots = [self.snapshot] if self.snapshot is not None else []
        return sorted(checkpoints + snapshots, key=operator.itemgetter(0), reverse=True)

    def log_resume_hint(self, step: int) -> None:
        """After the end of an unfinished run at `step`, log what it resumes from, and the number of lost steps."""
        self.settle()
        states = self.newest_states()
        lost = step - (states[0][0] if states else 0)
        left = "" if not lost else f"; step {step} is lost" if lost == 1 else f"; the {lost} steps since are lost"
        if states:
            logger.warning("resume from: %s, after step %d%s", states[0][1], states[0][0], left)
        else:
            logger.warning("no checkpoint to resume from%s", left)
        if self.best is not None:
            folder = self._store.folder(self.best.step)
            logger.warning("best checkpoint: %s, %s %.5g", folder, self.best.metric, self.best.value)

    def _keep(self, writing: _PendingCheckpoint) -> None:
        state, folder = writing.state, writing.store.folder(writing.state.step)
        if writing.store is not self._store:
            self.snapshot = state.step, folder
            return
        self.newest, self.step, self.best = folder, state.step, state.best
        text = "saved checkpoint of step %d: %s, written by the workers in %.1f s"
        logger.info(text, state.step, folder, writing.seconds)

    def _complete(self, writing: _PendingCheckpoint) -> Future[None]:
        """Collect the workers' checksums and complete the checkpoint (flush, file list) in a thread."""
        sums, writing.seconds = self._group.finish_snapshot()
        writing.completing = self._thread.submit(writing.store.complete, writing.state, sums)
        return writing.completing


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

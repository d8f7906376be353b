"""Writing of checkpoints, synchronously or in the background."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_gkd.config import Config
from hybrid_gkd.errors import CheckpointError
from hybrid_gkd.runtime.files import FileSum
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.student.checkpoint_store import Best, CheckpointStore, TrainerState

if TYPE_CHECKING:
    from pathlib import Path

    from hybrid_gkd.workers.group import WorkerGroup

logger = logging.getLogger(__name__)


SETTLE_SECONDS = 5.0
"""Time for the last part of a checkpoint, after a failure."""


@dataclass
class _PendingCheckpoint:
    """A checkpoint that is being written in the background."""

    state: TrainerState
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
        self.has_snapshot = False
        self._writing: _PendingCheckpoint | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def write(self, state: TrainerState) -> None:
        """Write a checkpoint and wait for it. Raises CheckpointError: it failed; earlier ones are intact."""
        self.finish()
        sums = dict[str, FileSum]()
        with self._store.writing(state, sums) as folder:
            sums |= self._group.save_checkpoint(folder, tokenizer_path=self._tokenizer_path)
        self._keep(state)

    def take_snapshot(self) -> None:
        """Wait for the previous checkpoint, then copy the workers' present state."""
        self.finish()
        self._group.take_snapshot(tokenizer_path=self._tokenizer_path)
        self.has_snapshot = True

    def start(self, state: TrainerState) -> None:
        """Start to write the snapshot, together with the trainer's state at its time."""
        assert self.has_snapshot
        self._group.write_snapshot(self._store.begin(state.step))
        self.has_snapshot, self._writing = False, _PendingCheckpoint(state)

    def poll(self) -> bool:
        """Return whether the checkpoint being written is now complete. Raises the errors of `finish`."""
        writing = self._writing
        if writing is None:
            return False
        try:
            if writing.completing is None and self._group.snapshot_written():
                self._complete(writing)
        except Exception:
            self._writing = None  # it failed: nothing is left to wait for
            raise
        if writing.completing is None or not writing.completing.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait until the checkpoint being written, if any, is complete.

        Raises CheckpointError or WorkerError: it failed; earlier ones are intact.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        completing, step = writing.completing or self._complete(writing), writing.state.step
        try:
            with waiting(f"the files of the checkpoint of step {step} to be flushed", self._timeout):
                completing.result(self._timeout.seconds)
        except TimeoutError:
            folder = self._store.folder(step)
            raise CheckpointError(f"cannot write checkpoint {folder}: not complete within {self._timeout}") from None
        self._keep(writing.state)
        text = "saved checkpoint of step %d: %s, written by the workers in %.1f s"
        logger.info(text, step, self.newest, writing.seconds)

    def settle(self) -> None:
        """After a failure, let a checkpoint whose files are all written become complete, within SETTLE_SECONDS."""
        writing, self._writing = self._writing, None
        if writing is None or writing.completing is None:
            return
        try:
            writing.completing.result(SETTLE_SECONDS)
        except Exception as error:
            logger.warning("the checkpoint of step %d is not complete: %r", writing.state.step, error)
        else:
            self._keep(writing.state)

    def _keep(self, state: TrainerState) -> None:
        self.newest, self.step, self.best = self._store.latest(), state.step, state.best

    def _complete(self, writing: _PendingCheckpoint) -> Future[None]:
        """Collect the workers' checksums and complete the checkpoint (flush, file list) in a thread."""
        sums, writing.seconds = self._group.finish_snapshot()
        writing.completing = self._thread.submit(self._store.complete, writing.state, sums)
        return writing.completing

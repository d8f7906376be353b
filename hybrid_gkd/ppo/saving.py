"""The checkpoints of a run: written before the next step, or by the workers behind the next ones."""

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


@dataclass
class _Writing:
    """A checkpoint on its way to the disk."""

    state: TrainerState
    seconds: float = 0.0
    """That the slowest worker wrote."""
    completing: Future[None] | None = None
    """Of what comes after the workers' part."""


class Saving:
    """Writes checkpoints, one at a time.

    Behind the next steps in three parts: `take_snapshot` while the workers have weights and optimizer state on their
    devices, `start` with the trainer's state of that moment, and `look` after each further step.
    """

    def __init__(self, config: Config, group: WorkerGroup, store: CheckpointStore):
        self._group, self._store = group, store
        model = config.actor_rollout_ref.model
        self._tokenizer_path = model.tokenizer_path or model.path
        self._timeout = Timeout(config.actor_rollout_ref.load_timeout, "actor_rollout_ref.load_timeout")
        self.newest: Path | None = None
        """The newest complete checkpoint that this run wrote or continued from, after `step`."""
        self.step = 0
        self.best: Best | None = None
        """As that checkpoint knows it: its own is there, while that of a newer one may have failed."""
        self.has_snapshot = False
        self._writing: _Writing | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def write(self, state: TrainerState) -> None:
        """Write a checkpoint now. Raises CheckpointError: it cannot be, and those before it are intact."""
        self.finish()
        sums = dict[str, FileSum]()
        with self._store.writing(state, sums) as folder:
            sums |= self._group.save_checkpoint(folder, tokenizer_path=self._tokenizer_path)
        self._keep(state)

    def take_snapshot(self) -> None:
        """Let the workers copy what is to be saved, as it is now; first wait for the checkpoint before."""
        self.finish()
        self._group.take_snapshot(tokenizer_path=self._tokenizer_path)
        self.has_snapshot = True

    def start(self, state: TrainerState) -> None:
        """Let them write the snapshot, which is of this state."""
        assert self.has_snapshot
        self._group.write_snapshot(self._store.begin(state.step))
        self.has_snapshot, self._writing = False, _Writing(state)

    def look(self) -> bool:
        """Whether the checkpoint that was being written has become complete. Raises as `finish`."""
        writing = self._writing
        if writing is None:
            return False
        try:
            if writing.completing is None and self._group.snapshot_written():
                self._complete(writing)
        except Exception:
            self._writing = None  # there is nothing to wait for any more
            raise
        if writing.completing is None or not writing.completing.done():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete.

        Raises CheckpointError or WorkerError: it cannot be, and those before it are intact.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        completing, step = writing.completing or self._complete(writing), writing.state.step
        try:
            with waiting(f"the files of the checkpoint after step {step} to be flushed and listed", self._timeout):
                completing.result(self._timeout.seconds)
        except TimeoutError:
            folder = self._store.folder(step)
            raise CheckpointError(f"cannot write checkpoint {folder}: not complete within {self._timeout}") from None
        self._keep(writing.state)
        logger.info("step %d is saved: %s, which the workers wrote in %.1f s", step, self.newest, writing.seconds)

    def _keep(self, state: TrainerState) -> None:
        self.newest, self.step, self.best = self._store.latest(), state.step, state.best

    def _complete(self, writing: _Writing) -> Future[None]:
        """Take the workers' checksums, and begin with the rest, which waits for the disk, in a thread."""
        sums, writing.seconds = self._group.finish_snapshot()
        writing.completing = self._thread.submit(self._store.complete, writing.state, sums)
        return writing.completing

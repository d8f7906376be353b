"""Time sharing of a GPU by workers of several services: one worker at a time has its model on the GPU."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from hybrid_gkd.errors import TeacherError

TURN_SECONDS = 600.0
"""Timeout for the other workers to finish their requests and release the GPU."""
POLL_SECONDS = 0.01


class GpuTurns:
    """Exclusive use of the GPUs of one worker, or of the CPU, among all workers with the same folder.

    A worker keeps its GPUs until its own requests are done and another worker waits. Each GPU has a lock file in the
    folder; the kernel releases the lock when the process ends. Every worker locks the files in the same order, which
    rules out a deadlock. Raises TeacherError: the folder cannot be written to.
    """

    def __init__(self, folder: str):
        self._gpus = sorted(os.environ.get("CUDA_VISIBLE_DEVICES", "cpu").split(","))
        try:
            self._turns, self._waiting = (
                [os.open(Path(folder) / f"{gpu}.{what}", os.O_CREAT | os.O_RDWR, 0o600) for gpu in self._gpus]
                for what in ("turn", "waiting")
            )
        except OSError as error:
            raise TeacherError(f"--turns {folder}: cannot create its locks: {error.strerror}") from error
        self.has_turn = False

    def take(self) -> None:
        """Wait for the GPUs. Raises TeacherError after TURN_SECONDS."""
        deadline = time.monotonic() + TURN_SECONDS
        for gpu, turn, waiting in zip(self._gpus, self._turns, self._waiting, strict=True):
            fcntl.flock(waiting, fcntl.LOCK_SH)
            while not _try_lock(turn):
                if time.monotonic() > deadline:
                    raise TeacherError(f"another teacher kept GPU {gpu} for more than {TURN_SECONDS:.0f} s")
                time.sleep(POLL_SECONDS)
            fcntl.flock(waiting, fcntl.LOCK_UN)
        self.has_turn = True

    @property
    def is_awaited(self) -> bool:
        """Return whether another worker waits for a GPU of this one."""
        return self.has_turn and not all(map(_is_free, self._waiting))

    def release(self) -> None:
        """Release the GPUs."""
        for turn in self._turns:
            fcntl.flock(turn, fcntl.LOCK_UN)
        self.has_turn = False


def _try_lock(file: int) -> bool:
    """Lock a file exclusively; return False if another process has a lock on it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(file: int) -> bool:
    """Return whether no other process has a lock on a file."""
    if _try_lock(file):
        fcntl.flock(file, fcntl.LOCK_UN)
        return True
    return False

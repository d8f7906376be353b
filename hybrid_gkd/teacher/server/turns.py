"""Turns of workers of several services on one GPU: only the model of the worker whose turn it is takes memory there."""

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
    """The turns of one worker on its GPUs, or on the CPU, among all workers with the same folder.

    A worker keeps its turn until another one waits for it and its own requests are done. The turn is a lock on a file
    for each GPU, which the kernel releases when a process ends.

    Args:
        folder: folder for the files; workers open them in the order of their GPUs, so that none waits in a circle.
    """

    def __init__(self, folder: str):
        self._gpus = sorted(os.environ.get("CUDA_VISIBLE_DEVICES", "cpu").split(","))
        self._turns, self._waiting = (
            [os.open(Path(folder) / f"{gpu}.{what}", os.O_CREAT | os.O_RDWR, 0o600) for gpu in self._gpus]
            for what in ("turn", "waiting")
        )
        self.has_turn = False

    def take(self) -> None:
        """Wait for the turn. Raises TeacherError after TURN_SECONDS."""
        deadline = time.monotonic() + TURN_SECONDS
        for gpu, turn, waiting in zip(self._gpus, self._turns, self._waiting, strict=True):
            fcntl.flock(waiting, fcntl.LOCK_SH)
            while not _locked(turn):
                if time.monotonic() > deadline:
                    raise TeacherError(f"another teacher kept GPU {gpu} for more than {TURN_SECONDS:.0f} s")
                time.sleep(POLL_SECONDS)
            fcntl.flock(waiting, fcntl.LOCK_UN)
        self.has_turn = True

    @property
    def is_awaited(self) -> bool:
        """Return whether another worker waits for this worker's turn to end."""
        return self.has_turn and not all(map(_locked_for_a_moment, self._waiting))

    def release(self) -> None:
        """End the turn."""
        for turn in self._turns:
            fcntl.flock(turn, fcntl.LOCK_UN)
        self.has_turn = False


def _locked(file: int) -> bool:
    """Lock a file for this process alone, unless another one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _locked_for_a_moment(file: int) -> bool:
    """Return whether no other process has a lock on a file."""
    if _locked(file):
        fcntl.flock(file, fcntl.LOCK_UN)
        return True
    return False

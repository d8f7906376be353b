"""Process group of a Ray cluster that a run starts on its machine; it ends with the run.

A signal to the run's own group (Ctrl-C, `timeout`, a closed terminal) does not reach it, so that the workers can still
save a checkpoint. A guard process kills the group if the run is killed; Ray's agents would otherwise stay for a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from types import FrameType

from hybrid_gkd.runtime.processes import wait_for_end

logger = logging.getLogger(__name__)

GUARD = "read _; sleep 1; kill -KILL 0"
"""Shell command that kills its group after the end of its input, which is the end of the run."""
END_SECONDS, KILL_SECONDS = 1.0, 5.0
"""Grace period for processes to end, and timeout for killed ones to disappear."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_joins: list[int] = []
"""Group that forked processes join now."""


def _join() -> None:
    for group in _joins:
        os.setpgid(0, group)


os.register_at_fork(after_in_child=_join)


@contextlib.contextmanager
def own_group() -> Iterator[int]:
    """Create a process group; all of its processes, the guard included, have ended at the end of the block."""
    with subprocess.Popen(
        ["sh", "-c", GUARD], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        process_group=0,
    ) as guard:  # fmt: skip
        try:
            yield guard.pid
        finally:
            wait_for_end(guard.pid, END_SECONDS, besides=[guard.pid])
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
            if left := wait_for_end(guard.pid, KILL_SECONDS):
                logger.warning("processes of Ray still running: %s", ", ".join(map(str, sorted(left))))


@contextlib.contextmanager
def joining_group(group: int | None) -> Iterator[None]:
    """Put processes that are started in the block into the group; signals are delivered after the block.

    An interruption would leave Ray without a record of the processes it has started.
    """
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    is_main = threading.current_thread() is threading.main_thread()
    for number in SIGNALS:
        if is_main and before[number] != signal.SIG_IGN:
            signal.signal(number, remember)
    _joins.extend([] if group is None else [group])
    try:
        yield
    except SystemExit:  # from Ray's SIGTERM handler, which is active while Ray starts
        came.append(signal.SIGTERM)
    finally:
        _joins.clear()
        for number in SIGNALS if is_main else ():  # Ray's handlers would end the process without cleanup
            signal.signal(number, before[number])
    for first in came[:1]:
        signal.raise_signal(first)

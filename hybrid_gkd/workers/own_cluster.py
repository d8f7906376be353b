"""Process group and folder of a Ray cluster that a run starts on its machine; both end with the run.

A signal to the run's own group (Ctrl-C, `timeout`, a closed terminal) does not reach it, so that the workers can still
save a checkpoint. If the run is killed, a guard process logs that, kills the group and removes the folder; Ray's agents
would otherwise stay for a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from hybrid_gkd.errors import WorkerError
from hybrid_gkd.runtime.processes import wait_for_end
from hybrid_gkd.runtime.signals import handled_signals

logger = logging.getLogger(__name__)

KILLED = "the driver ended without an error of its own: it was killed, or a library aborted it"
GUARD = f"""read _
if tail -n 1 "$1/starts.jsonl" 2>/dev/null | grep -qv '"end"'; then
    echo "$(date '+%Y-%m-%d %H:%M:%S') ERROR run failed: {KILLED}" >>"$1/run.log"
    echo '{{"end": '"$(date +%s)"', "error": "{KILLED}"}}' >>"$1/starts.jsonl"
fi
sleep 1; setsid sh -c 'kill -s KILL -- "-$0"; sleep 1; rm -rf -- "$1"' $$ "$0"
rm -rf -- "$0"; kill -KILL 0"""
"""Shell command at the end of a run without shutdown: log it in its folder $1, kill its group, remove the folder $0.

A process of Ray that is starting creates the folder again, so the folder is removed when the group has ended, by a
process outside of it. The last line does both on systems without `setsid`.
"""
END_SECONDS, KILL_SECONDS = 1.0, 5.0
"""Grace period for processes to end, and timeout for killed ones to disappear."""
_joins: list[int] = []
"""Group that forked processes join now."""


def _join() -> None:
    for group in _joins:
        os.setpgid(0, group)


os.register_at_fork(after_in_child=_join)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder that other users cannot enter, for sockets and logs; its path is short, as a socket's must be.

    Raises WorkerError: the file system does not keep its mode.
    """
    parent = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gkd_", dir=parent, ignore_cleanup_errors=True) as folder:
        mode = stat.S_IMODE(os.stat(folder).st_mode)
        if mode & 0o077:
            rule = f"other users could connect to Ray's sockets: the mode of {folder} is {mode:o} instead of 700"
            raise WorkerError(f"RAY_TMPDIR: {rule}; set it to a folder of another file system")
        yield Path(folder)


@contextlib.contextmanager
def own_group(folder: Path | None, run_dir: Path | None) -> Iterator[int]:
    """Create a process group; all of its processes, the guard included, have ended at the end of the block.

    If this process is killed, the guard removes `folder`, and records that in the log and the starts of `run_dir`, if
    given.
    """
    with subprocess.Popen(
        ["sh", "-c", GUARD, str(folder or ""), str(run_dir or "")], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, process_group=0,
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
    received: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # only the main thread can set handlers
    # Ray installs handlers that would end the process without cleanup.
    with handled_signals(lambda number, _: received.append(number)) if is_main else contextlib.nullcontext():
        _joins.extend([] if group is None else [group])
        try:
            yield
        except SystemExit:  # from Ray's SIGTERM handler, which is active while Ray starts
            received.append(signal.SIGTERM)
        finally:
            _joins.clear()
    for first in received[:1]:
        signal.raise_signal(first)

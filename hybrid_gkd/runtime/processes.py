"""List the members of a process group, wait until they have ended, and remove the folder of a killed process."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path


def members(group: int) -> set[int]:
    """Return the ids of the running processes of a group; empty on systems without /proc."""
    return {pid for pid, its_group in _running(Path("/proc").glob("[0-9]*/stat")) if its_group == group}


def _running(stats: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """Yield id and group of the processes of these files of /proc that are running."""
    for stat in stats:
        with contextlib.suppress(OSError):  # it has just ended
            state, _, group = stat.read_bytes().rpartition(b")")[2].split()[:3]  # a name may be cut within a character
            if state not in b"ZX":
                yield int(stat.parent.name), int(group)


def wait_for_end(group: int, timeout: float, besides: Sequence[int] = ()) -> set[int]:
    """Wait until a group has ended, for at most `timeout` seconds; return the ids that are still running.

    `besides`: process ids to ignore.
    """
    return _wait(lambda: members(group).difference(besides), timeout)


def wait_for_processes(ids: Collection[int], timeout: float) -> set[int]:
    """Wait until processes have ended, for at most `timeout` seconds; return the ids that are still running."""
    stats = [Path(f"/proc/{pid}/stat") for pid in ids]
    return _wait(lambda: {pid for pid, _ in _running(stats)}, timeout)


def _wait(running: Callable[[], set[int]], timeout: float) -> set[int]:
    deadline = time.monotonic() + timeout
    while (left := running()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a folder that other users cannot enter, and remove it at the end, also if this process is killed.

    `parent`: default: the system's folder for temporary files.
    """
    made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    with made as folder, subprocess.Popen(
        ["sh", "-c", 'read _; rm -rf -- "$0"', folder], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:  # fmt: skip
        try:
            yield Path(folder)
        finally:
            guard.kill()  # a forked process may still have the other end of its input

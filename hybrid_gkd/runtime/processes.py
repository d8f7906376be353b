"""List the members of a process group and wait until they have ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path


def members(group: int) -> set[int]:
    """Return the ids of the running processes of a group; empty on systems without /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, its_group = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.add(int(stat.parent.name))
    return found


def wait_for_end(group: int, timeout: float, besides: Sequence[int] = ()) -> set[int]:
    """Wait until a group has ended, for at most `timeout` seconds; return the ids that are still running.

    `besides`: process ids to ignore.
    """
    deadline = time.monotonic() + timeout
    while (left := members(group).difference(besides)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left

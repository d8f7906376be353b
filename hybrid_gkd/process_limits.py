"""Limits of the operating system on the number of processes and threads, which count alike on Linux."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from pathlib import Path
from typing import NamedTuple

REFUSALS = ("can't start new thread", "pthread_create")
"""Texts of Python and of libraries in C++ for a refused process or thread."""
UNAVAILABLE = "Resource temporarily unavailable"
"""Text of libraries in C++ for one, and of sockets for other reasons."""
NEAR = 0.8
"""Fraction of a limit that is in use where it is taken for the reason of UNAVAILABLE."""


class ProcessLimit(NamedTuple):
    """A limit that applies to this process."""

    name: str
    """`ulimit -u`, or the file of a control group that sets it."""
    most: int
    used: int

    def __str__(self) -> str:
        return f"{self.name} is {self.most}, {self.used} in use"


def process_limits(root: Path = Path("/")) -> list[ProcessLimit]:
    """Return the limits of this user and of the control groups of this process; empty if none can be read."""
    limits = list[ProcessLimit]()
    of_user, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if of_user != resource.RLIM_INFINITY and os.getuid() != 0:  # root is exempt
        limits.append(ProcessLimit("ulimit -u", of_user, _threads_of_user(root)))
    for folder in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or not a group of processes
            most, used = (int((folder / name).read_text(encoding="utf-8")) for name in ("pids.max", "pids.current"))
            limits.append(ProcessLimit(str(folder / "pids.max"), most, used))
    return limits


def _threads_of_user(root: Path) -> int:
    threads = 0
    for process in (root / "proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if process.stat().st_uid == os.getuid():
                threads += len(os.listdir(process / "task"))
    return threads


def _control_groups(root: Path) -> list[Path]:
    """Return the folders of the control groups of this process, of versions 1 and 2, the inner ones first."""
    folders = list[Path]()
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "pids"):
                top = root / "sys/fs/cgroup" / controllers
                inner = top / path.strip("/")
                folders += [each for each in (inner, *inner.parents) if each.is_relative_to(top)]
    return folders


def describe_refusal(error: BaseException) -> str:
    """Return the limits if the error is a process or thread that the operating system has refused, else ""."""
    text = str(error)
    is_certain = any(each in text for each in REFUSALS)
    if not is_certain and UNAVAILABLE not in text and getattr(error, "errno", None) != errno.EAGAIN:
        return ""
    limits = [each for each in process_limits() if is_certain or each.used >= NEAR * each.most]
    if not (limits or is_certain):
        return ""
    found = "; ".join(map(str, limits)) or "none can be read"
    return f"the limit of processes and threads is reached ({found}): raise it, or end other processes"

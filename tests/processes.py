"""Processes of tests, also such as are no children of theirs: wait for them, ask whether they live, stop them."""

import os
import signal
import time
from pathlib import Path

import psutil

TIMEOUT = 120.0  # seconds; ends a test that hangs


def wait_until(condition, what="for a condition"):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"waited {TIMEOUT} s {what}"
        time.sleep(0.02)


def is_alive(pid):
    return _state(Path(f"/proc/{pid}")) not in "ZX"


def stop_process(pid):
    """SIGSTOP, until it has taken effect: a busy machine lets some threads go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state(thread) in "TX" for thread in threads.iterdir()), f"for process {pid} to stop")


def command_line(process):
    """Return the command line of a process, empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # zombies included
        return ""


def files_of(process):
    """Return the paths of a process's open files, none once it has ended."""
    try:
        return {file.path for file in process.open_files()}
    except psutil.Error:  # also of a process that another user owns
        return set()


def descendants(process, part):
    """Return the processes below this one that have a text in their command line."""
    return [each for each in process.children(recursive=True) if part in command_line(each)]


def _state(folder):
    """Return the state of a process or thread, as a letter; X if it has ended."""
    try:
        return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"

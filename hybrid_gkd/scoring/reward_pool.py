"""Pool of processes for reward functions: a process that hangs or crashes is killed and replaced.

The library pebble manages the processes. Each is the leader of a process group, so that signals to the run (Ctrl-C, a
closed terminal) do not reach it, and child processes of a function are killed with it. A guard kills the group when the
run ends in any way. Processes are spawned at the first completion, not forked, because the run has threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import importlib
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessPool

from hybrid_gkd.errors import HybridGKDError, TrainingError
from hybrid_gkd.scoring.reward_functions import TIMED_OUT, Failure, Outcome, RewardFunction, load_functions
from hybrid_gkd.search_path import SAFE_PATH

if TYPE_CHECKING:
    from hybrid_gkd.config import RewardConfig
    from hybrid_gkd.scoring.builtin_rewards import Response

MOST_WORKERS = 8
"""Default upper bound of `reward.num_workers`."""
MOST_BREAKS = 3
"""Broken pools in a row, without an outcome between them, that are tolerated. A pool can break by chance if a process
ends at the wrong moment."""
KILL_GRACE_SECONDS = 1.0
"""Grace period after `reward.timeout` for a process to write its stack; then it is killed."""
CLEAN_EXIT = 256
"""Replacement for exit code 0, because pebble ignores the task of a process that exits with 0."""
GUARD = 'read _; rm -rf "$0"; kill -KILL 0'
"""Shell command that waits for end of input, which is the end of the run, and kills its process group."""
Unit = list[tuple["Response", "Future[Outcome]"]]
"""Completions of one call, with the futures of their outcomes."""
Work = tuple[RewardFunction, Unit]

_functions: dict[str, RewardFunction] | HybridGKDError = {}
"""Loaded functions, or the error of loading them; set in processes of the pool."""


class _Process(SpawnProcess):
    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return CLEAN_EXIT if code == 0 else code


class _Context(SpawnContext):
    Process = _Process


class RewardPool:
    """Processes that compute the reward functions of a run, which each one loads from the section `reward`."""

    def __init__(self, section: RewardConfig):
        context = _Context()
        self.section = section
        self.num_done = 0
        """Number of completed outcomes, to detect progress."""
        self._size = section.num_workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._guarded, self._lifeline = context.Pipe(duplex=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="hybrid_gkd_rewards_", ignore_cleanup_errors=True)
        """Folder for the stacks of processes that reach the timeout."""
        self._new_pool = functools.partial(
            ProcessPool, max_workers=self._size, initializer=_enter,
            initargs=(section, self._guarded, self._stacks.name), context=context,
        )  # fmt: skip
        self._pool = self._new_pool()
        self._waiting: deque[Work] = deque()
        self._running: dict[Path, Work] = {}
        """Running work by its stack file."""
        self._started = self._breaks = 0
        self._closed = False
        self._lock = threading.RLock()  # pebble may call back from within its own call

    def submit(self, function: RewardFunction, responses: Sequence[Response]) -> list[Future[Outcome]]:
        """Queue a function of completions; one call for all of them if it `needs_all`.

        The futures raise TrainingError if the pool has ended.
        """
        unit: Unit = [(response, Future()) for response in responses]
        units = [unit] if function.needs_all else [[each] for each in unit]
        with self._lock:
            self._waiting.extend((function, each) for each in units)
            self._feed()
        return [future for _, future in unit]

    def close(self) -> None:
        """Kill the processes and their children."""
        with self._lock:
            self._closed = True
        self._pool.stop()
        self._lifeline.close()
        self._pool.join()
        self._guarded.close()
        self._stacks.cleanup()

    def _feed(self) -> None:
        """Start queued work on idle processes."""
        while self._waiting and len(self._running) < self._size:
            function, unit = self._waiting.popleft()
            while self._waiting and self._waiting[0][0] is function:
                more = self._waiting[0][1]  # more than one after a broken pool
                if not len(unit) + len(more) <= function.at_once < math.inf:
                    break
                self._waiting.popleft()
                unit = unit + more
            self._started += 1
            stack, pool = Path(self._stacks.name, str(self._started)), self._pool
            self._running[stack] = function, unit
            limit = None if self.section.timeout == math.inf else self.section.timeout + KILL_GRACE_SECONDS
            arguments = function.name, [response for response, _ in unit], str(stack), self.section.timeout
            try:
                task = pool.schedule(_compute, args=arguments, timeout=limit)
            except RuntimeError as error:  # the pool is closed or broken
                self._on_broken(pool, error)
            else:
                task.add_done_callback(functools.partial(self._done, pool, stack))

    def _done(self, pool: ProcessPool, stack: Path, task: Future[list[Outcome]]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        if isinstance(error, BrokenProcessPool | CancelledError):
            self._on_broken(pool, error)
            return
        if isinstance(error, ProcessExpired):
            with contextlib.suppress(ProcessLookupError):  # it ended before it created its process group
                os.killpg(error.pid, signal.SIGKILL)  # its children; the guard keeps the group id from being reused
        with self._lock:
            work = self._running.pop(stack, None)
            if work is None:  # its pool broke: the work was queued again
                return
            function, unit = work
            again = error is not None and len(unit) > 1 and not function.needs_all
            if again:  # retry one by one to find the completion at fault
                alone = dataclasses.replace(function, at_once=1)
                self._waiting.extendleft((alone, [each]) for each in reversed(unit))
            else:
                self.num_done += len(unit)
            self._breaks = 0
            self._feed()
        if not again:
            outcomes = task.result() if error is None else [Failure(self._reason(error, stack))] * len(unit)
            for (_, future), outcome in zip(unit, outcomes, strict=True):
                future.set_result(outcome)

    def _on_broken(self, pool: ProcessPool, error: BaseException) -> None:
        """Restart running work in a new pool, or fail it if the pool is closed or has broken too often."""
        with self._lock:
            if pool is not self._pool:
                return
            lost = [*self._running.values()]
            self._running.clear()
            if not self._closed and self._breaks < MOST_BREAKS:
                self._breaks += 1
                self._waiting.extendleft(reversed(lost))
                self._pool = self._new_pool()
                threading.Thread(target=_retire, args=[pool], name="end broken pool", daemon=True).start()
                self._feed()
                return
            lost += self._waiting
            self._waiting.clear()
        failed = TrainingError(f"the reward processes have ended: {type(error).__name__}: {error}")
        for _, unit in lost:
            for _, future in unit:
                future.set_exception(failed)

    def _reason(self, error: BaseException, stack: Path) -> str:
        """Return the reason of a missing score."""
        if isinstance(error, TimeoutError):
            return TIMED_OUT + self._place(stack)
        if isinstance(error, ProcessExpired):
            return f"terminated its process (exit code {0 if error.exitcode == CLEAN_EXIT else error.exitcode})"
        return f"raised {type(error).__name__}: {error}"  # SystemExit, for example

    def _place(self, stack: Path) -> str:
        """Return the code location at the timeout, preferably in the user's own file; "" if unknown."""
        with contextlib.suppress(OSError):
            frames = re.findall(r'File "(.+)", line (\d+)', stack.read_text(encoding="utf-8"))
            own = [frame for frame in frames if frame[0].endswith(self.section.custom_reward_function.path or "\0")]
            for file, line in (own or frames)[:1]:
                return f" at {file}:{line}"
        return ""


def _retire(pool: ProcessPool) -> None:
    """Stop the remaining processes of a broken pool; must not run in the pool's own thread, which it joins."""
    pool.stop()
    pool.join()


def _enter(section: RewardConfig, guarded: Connection, stacks: str) -> None:
    """Initialize a process of the pool."""
    global _functions
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    subprocess.Popen(
        ["sh", "-c", GUARD, stacks], stdin=guarded.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    guarded.close()
    os.environ.pop(SAFE_PATH, None)  # scripts started by a function may import modules from their own folder
    try:
        _functions = load_functions(section)
        if {"math", "by_data_source"} & _functions.keys():
            with contextlib.suppress(ModuleNotFoundError):  # by_data_source without math: see check_data_sources
                importlib.import_module("math_verify")  # takes a second: not within the first timeout
    except HybridGKDError as error:
        _functions = error


def _compute(name: str, responses: Sequence[Response], stack: str, timeout: float) -> list[Any]:
    """Compute a function in a process of the pool."""
    if isinstance(_functions, HybridGKDError):
        return [Failure(f"could not be loaded in the reward process: {_functions}")] * len(responses)
    if timeout == math.inf:
        return _functions[name].compute(responses)
    with open(stack, "w", encoding="utf-8") as file:
        faulthandler.dump_traceback_later(timeout, file=file)
        try:
            return _functions[name].compute(responses)
        finally:
            faulthandler.cancel_dump_traceback_later()
            os.unlink(stack)

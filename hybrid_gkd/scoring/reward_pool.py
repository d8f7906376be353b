"""Processes that compute rewards: what hangs or crashes there is killed and replaced, and costs the run nothing else.

The library pebble runs them. Each has a process group of its own, so that a signal to the run (Ctrl-C, a closed
terminal) does not reach it, and what a function has started is killed with it; a guard kills the group when the run
ends, however it ends. They are spawned, not forked from a process with threads, when the first response comes.
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
from hybrid_gkd.scoring.reward_functions import (
    NOT_IN_TIME,
    Failure,
    Outcome,
    RewardFunction,
    load_functions,
)
from hybrid_gkd.search_path import SAFE_PATH

if TYPE_CHECKING:
    from hybrid_gkd.config import RewardConfig
    from hybrid_gkd.scoring.builtin_rewards import Response

MOST_WORKERS = 8
"""Where `reward.num_workers` says nothing."""
MOST_BREAKS = 3
"""A pool can break, with all that it computes, when a process ends at the wrong moment. So many in a row, without an
outcome between them, are no accident."""
GRACE_SECONDS = 1.0
"""For a process to say by itself, within `reward.timeout`, what took too long; then it is killed."""
ENDED_WELL = 256
"""Stands for exit code 0: pebble does not look at what a process that ends with it was computing."""
GUARD = 'read _; rm -rf "$0"; kill -KILL 0'
"""Waits for the end of its input, which is the end of the run, and kills its process group."""
Unit = list[tuple["Response", "Future[Outcome]"]]
"""What has to be computed in one call."""
Work = tuple[RewardFunction, Unit]

_functions: dict[str, RewardFunction] | HybridGKDError = {}
"""In a process of the pool."""


class _Process(SpawnProcess):
    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return ENDED_WELL if code == 0 else code


class _Context(SpawnContext):
    Process = _Process


class RewardPool:
    """The processes of a run.

    Args:
        section: the configuration of the rewards, from which each process loads the functions.
    """

    def __init__(self, section: RewardConfig):
        context = _Context()
        self.section = section
        self.num_done = 0
        """Responses, so that who waits sees progress."""
        self._size = section.num_workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._guarded, self._lifeline = context.Pipe(duplex=False)
        self._stacks = tempfile.TemporaryDirectory(prefix="hybrid_gkd_rewards_", ignore_cleanup_errors=True)
        """Where a process writes what it was at when its time was up."""
        self._new_pool = functools.partial(
            ProcessPool, max_workers=self._size, initializer=_enter,
            initargs=(section, self._guarded, self._stacks.name), context=context,
        )  # fmt: skip
        self._pool = self._new_pool()
        self._waiting: deque[Work] = deque()
        self._running: dict[Path, Work] = {}
        """By the file of its stack."""
        self._started = self._breaks = 0
        self._closed = False
        self._lock = threading.RLock()  # pebble may call back from within its own call

    def submit(self, function: RewardFunction, responses: Sequence[Response]) -> list[Future[Outcome]]:
        """Compute a function of responses, of all together where it `needs_all`.

        The futures raise TrainingError where the processes have ended.
        """
        unit: Unit = [(response, Future()) for response in responses]
        units = [unit] if function.needs_all else [[each] for each in unit]
        with self._lock:
            self._waiting.extend((function, each) for each in units)
            self._feed()
        return [future for _, future in unit]

    def close(self) -> None:
        """Kill the processes, whatever they do, and with them all that they have started."""
        with self._lock:
            self._closed = True
        self._pool.stop()
        self._lifeline.close()
        self._pool.join()
        self._guarded.close()
        self._stacks.cleanup()

    def _feed(self) -> None:
        """Give each free process what it can compute at once."""
        while self._waiting and len(self._running) < self._size:
            function, unit = self._waiting.popleft()
            while self._waiting and self._waiting[0][0] is function:
                more = self._waiting[0][1]  # several, where they were lost with a pool
                if not len(unit) + len(more) <= function.at_once < math.inf:
                    break
                self._waiting.popleft()
                unit = unit + more
            self._started += 1
            stack, pool = Path(self._stacks.name, str(self._started)), self._pool
            self._running[stack] = function, unit
            limit = None if self.section.timeout == math.inf else self.section.timeout + GRACE_SECONDS
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
            with contextlib.suppress(ProcessLookupError):  # it had not begun a group of its own
                os.killpg(error.pid, signal.SIGKILL)  # what it has started; its guard has kept the number from others
        with self._lock:
            work = self._running.pop(stack, None)
            if work is None:  # its pool broke, and it is computed again
                return
            function, unit = work
            again = error is not None and len(unit) > 1 and not function.needs_all
            if again:  # whose fault it was shows one by one
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
        """Compute what was under way in new processes, or give up where the last ones were closed or all ended too."""
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
        failed = TrainingError(f"the processes that compute rewards have ended: {type(error).__name__}: {error}")
        for _, unit in lost:
            for _, future in unit:
                future.set_exception(failed)

    def _reason(self, error: BaseException, stack: Path) -> str:
        """Why there is no score."""
        if isinstance(error, TimeoutError):
            return NOT_IN_TIME + self._place(stack)
        if isinstance(error, ProcessExpired):
            return f"ended its process (exit code {0 if error.exitcode == ENDED_WELL else error.exitcode})"
        return f"raised {type(error).__name__}: {error}"  # SystemExit, for example

    def _place(self, stack: Path) -> str:
        """Where it was when its time was up: in the user's own file, if there."""
        with contextlib.suppress(OSError):
            frames = re.findall(r'File "(.+)", line (\d+)', stack.read_text(encoding="utf-8"))
            own = [frame for frame in frames if frame[0].endswith(self.section.custom_reward_function.path or "\0")]
            for file, line in (own or frames)[:1]:
                return f"; it was at {file}:{line}"
        return ""


def _retire(pool: ProcessPool) -> None:
    """End the processes that a broken pool still has; not in its own thread, which this waits for."""
    pool.stop()
    pool.join()


def _enter(section: RewardConfig, guarded: Connection, stacks: str) -> None:
    """Begin a process of the pool."""
    global _functions
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    subprocess.Popen(
        ["sh", "-c", GUARD, stacks], stdin=guarded.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    guarded.close()
    os.environ.pop(SAFE_PATH, None)  # scripts that a function starts find the modules beside them
    try:
        _functions = load_functions(section)
        if {"math", "by_data_source"} & _functions.keys():
            with contextlib.suppress(ModuleNotFoundError):  # no row of by_data_source is math: see check_data_sources
                importlib.import_module("math_verify")  # a second, before the first timeout begins
    except HybridGKDError as error:
        _functions = error


def _compute(name: str, responses: Sequence[Response], stack: str, timeout: float) -> list[Any]:
    """In a process of the pool."""
    if isinstance(_functions, HybridGKDError):
        return [Failure(f"could not be loaded by the process that computes it: {_functions}")] * len(responses)
    if timeout == math.inf:
        return _functions[name].compute(responses)
    with open(stack, "w", encoding="utf-8") as file:
        faulthandler.dump_traceback_later(timeout, file=file)
        try:
            return _functions[name].compute(responses)
        finally:
            faulthandler.cancel_dump_traceback_later()
            os.unlink(stack)

"""Start a run again when it ends by a fault: `--supervise`. The parent loads no model and no library of the run."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from hybrid_gkd.config import Config
from hybrid_gkd.config.loading import examine_config
from hybrid_gkd.launch.command_line import default_config_name
from hybrid_gkd.reporting.logs import log_to_console, run_log
from hybrid_gkd.reporting.starts import append_row, lost_work, read_starts, rows_of_starts
from hybrid_gkd.runtime.signals import SIGNALS, handled_signals
from hybrid_gkd.student.checkpoint_store import LATEST, SNAPSHOT
from hybrid_gkd.teacher.server.local import child_environment, describe_exit

logger = logging.getLogger(__name__)

BAD_INPUT = ("ConfigError", "DataError", "ModelError", "SeveralErrors", "TeacherMismatch")
"""Errors that the next start would raise again."""
DEFAULT_RESTARTS = 20
"""Limit where `trainer.max_restarts` is 0."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds before a restart; doubled by each one after a start of less than SHORT_START seconds."""
SHORT_START = 600.0
POINTERS = (LATEST, f"{SNAPSHOT}/{LATEST}")
"""Files that name the step of the newest checkpoint and of the newest snapshot."""
ORPHANS_SECONDS = 30.0
"""Time for processes of a run that was killed to end and to free their memory."""
NOTHING_LOST = {"steps_repeated": 0, "seconds_repeated": 0.0}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class RestartLoop:
    """Runs `python -m hybrid_gkd` with these arguments until it succeeds, or a restart would fail again.

    Signals are forwarded to the run, and end the supervision.
    """

    def __init__(self, config: Config, arguments: list[str]):
        self._config, self._arguments, self._run_dir = config, arguments, config.run_dir
        self._most = config.trainer.max_restarts or DEFAULT_RESTARTS
        self._began = time.time()
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None

    def run(self) -> int:
        """Return the exit code of the last start."""
        with contextlib.suppress(AttributeError, OSError):  # Linux only: adopt orphans of a killed run
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        with handled_signals(self._pass_on):
            restarts = short_starts = 0
            failure: tuple[int, bool] | None = None  # the failed step, and whether the start was ready before it
            while True:
                began, since = time.monotonic(), time.time()
                code = self._start(resume=restarts > 0)
                # Selected by time: a new run renames the folder of an earlier one.
                starts = [start for start in read_starts(self._run_dir) if start["start"] >= since]
                error = self._fault(code, starts, is_first=restarts == 0)
                if error is None:
                    return code
                # Restarts within the run, which replaced its workers only.
                rows = [row for row in rows_of_starts(self._run_dir) if row.get("restart", 0.0) > since]
                restarts += len(rows)
                if rows:
                    failure = rows[-1]["failed_step"], True
                saved = max(_read_number(self._run_dir / name) for name in POINTERS)
                lost = lost_work(self._run_dir, saved)
                step, was_ready = saved + int(lost["steps_repeated"]) + 1, any("ready" in start for start in starts)
                repeats, failure = failure == (step, was_ready), (step, was_ready)
                if repeats or restarts >= self._most:
                    limit = f"there were {restarts} restarts (trainer.max_restarts)"
                    why = f"step {step} has failed twice" if repeats else limit
                    self._log(f"the run is not started again: {why}; the last error: {error}")
                    return code if code > 0 else 1
                restarts += 1
                short_starts = short_starts + 1 if time.monotonic() < began + SHORT_START else 0
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** max(0, short_starts - 1))
                self._log(f"restart {restarts} of {self._most} in {pause:.0f} s, since step {step} has failed: {error}")
                row = {"restart": time.time(), "failed_step": step, "reason": error}
                append_row(self._run_dir, row | (lost if was_ready else NOTHING_LOST))
                deadline = time.monotonic() + pause
                while time.monotonic() < deadline and self._signal is None:
                    time.sleep(0.1)
                if self._signal is not None:
                    return 128 + self._signal

    def _start(self, *, resume: bool) -> int:
        """Run once; return the exit code when all of its processes have ended."""
        own = [f"trainer.max_restarts={self._most}"]
        if resume and self._resumes_automatically():
            own.append("trainer.resume_mode=auto")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hybrid_gkd", *self._arguments, *own], env=child_environment(),
            process_group=0,  # signals of the terminal reach it only through `_pass_on`, once
            preexec_fn=_end_with_parent,
        )  # fmt: skip
        if self._signal is not None:  # received before the process existed
            self._process.send_signal(self._signal)
        code = self._process.wait()
        deadline = time.monotonic() + ORPHANS_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.05)
        return code

    def _resumes_automatically(self) -> bool:
        """Return whether a restart needs trainer.resume_mode=auto to resume from what earlier starts have saved."""
        pointers, mode = [self._run_dir / name for name in POINTERS], self._config.trainer.resume_mode
        return mode == "disable" or (
            mode == "resume_path" and any(each.is_file() and each.stat().st_mtime > self._began for each in pointers)
        )  # fmt: skip

    def _fault(self, code: int, starts: list[dict[str, Any]], *, is_first: bool) -> str | None:
        """Return the error of a start after which a restart may succeed.

        None after success, a signal of the user, or invalid input. `starts`: its entries from `read_starts`.
        """
        by_user = code >= 128 or code in [-number for number in SIGNALS] or self._signal is not None
        if code == 0 or by_user or code == 2:
            return None
        if not starts:  # the preflight checks ended it
            return f"it {describe_exit(code)} before its start" if code < 0 or not is_first else None
        error = starts[-1].get("error")
        if error is None or code < 0:
            error = f"the driver {describe_exit(code)}"
            if "end" not in starts[-1]:
                append_row(self._run_dir, {"end": time.time(), "error": error})
        return None if error.partition(":")[0] in BAD_INPUT else error

    def _log(self, text: str) -> None:
        """Log a line, also to run.log."""
        with run_log(self._run_dir) if self._run_dir.is_dir() else contextlib.nullcontext():
            logger.warning("%s", text)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the run."""
        self._signal = number
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)


def _end_with_parent() -> None:
    """Stop the run, after its step, if its supervisor is killed."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _read_number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def supervise(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run the parsed command line under a supervisor; return its exit code. `arguments`: those of the run."""
    log_to_console()
    name = options.config_name or default_config_name(options.overrides)
    config, problems = examine_config(options.overrides, config_name=name, config_path=options.config_path)
    if config is None or problems:  # the run prints the errors
        return subprocess.run([sys.executable, "-m", "hybrid_gkd", *arguments], env=child_environment()).returncode
    return RestartLoop(config, arguments).run()

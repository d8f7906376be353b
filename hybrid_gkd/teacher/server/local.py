"""Local teacher service as a context manager, used by the trainer's launcher."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hybrid_gkd
from hybrid_gkd.errors import TeacherError
from hybrid_gkd.runtime.processes import members, temporary_folder, wait_for_end
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.teacher.keys import make_keys

log = logging.getLogger("hybrid_gkd.teacher")

END_SECONDS = 20.0
"""Grace period for a teacher to answer open requests and to stop its workers."""
KILL_SECONDS = 5.0
"""Timeout for killed processes to disappear."""
MAX_RESTARTS = 5
"""Restarts of a service that was killed. One that does not become ready again is not restarted."""


class TeacherProcess:
    """Runs `python -m hybrid_gkd.teacher serve` as a child process; entering the context starts it in the background.

    The service ends with this process, even if that is killed. It accepts only the keys in `keys`, created for it.

    Args:
        ckpt_path: model folder.
        log_path: file for the output of the service.
        port: port for clients; 0 picks a free one.
        options: further command-line arguments.
        environment: variables added to the child's environment.
        start_timeout: seconds until the service must be ready.
    """

    def __init__(
        self, ckpt_path: str, *, log_path: str | Path, port: int = 0,
        options: list[str] | None = None, environment: dict[str, str] | None = None, start_timeout: float = 900.0,
    ):
        self._environment = {**child_environment(), **(environment or {})}
        self._log_path, self._started, self._began = Path(log_path), 0.0, 0.0
        self._start_timeout = Timeout(start_timeout, "actor_rollout_ref.teacher.start_timeout")
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(temporary_folder("hybrid_gkd_teacher_"))
        self._ready_file, self.keys = folder / "ready.json", folder / "keys" / "client"
        """Folder with the keys of a client; the one of a worker is next to it."""
        server_keys = make_keys(self.keys.parent)[0]
        self._command = [
            sys.executable, "-m", "hybrid_gkd.teacher", "serve", f"--ckpt-path={ckpt_path}", f"--port={port}",
            "--worker-port=0", "--drain-timeout=5", f"--keys={server_keys}",
            *(options or []), f"--ready-file={self._ready_file}", f"--die-with-parent={os.getpid()}",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._num_restarts = 0
        self.address = self.worker_address = ""
        """host:port for clients and for further workers; set once the service is ready."""

    def __enter__(self) -> TeacherProcess:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path.write_bytes(b"")
        self._start()
        return self

    def _start(self, *options: str) -> None:
        """Start the service; `options` come after the others."""
        self._started, self._began = time.monotonic(), time.time()
        with open(self._log_path, "ab") as log_file:
            # A separate session: Ctrl-C in the terminal reaches only the trainer, which stops the teacher last.
            self._process = subprocess.Popen(
                [*self._command, *options], stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                env=self._environment, start_new_session=True,
            )

    def _restart(self, how: str) -> None:
        """Start a service that was killed again, at the same ports: clients find it, and repeat their requests."""
        self._num_restarts += 1
        log.warning(
            "the teacher of this run %s, restart %d of %d; its log: %s", how, self._num_restarts, MAX_RESTARTS,
            self._log_path,
        )  # fmt: skip
        self._ready_file.unlink()
        port, worker_port = (address.rpartition(":")[2] for address in (self.address, self.worker_address))
        self._start(f"--port={port}", f"--worker-port={worker_port}")

    def __exit__(self, *exc_info: object) -> None:
        if self._process is not None:
            with waiting("the teacher of this run to end", Timeout(END_SECONDS)):
                stop_process(self._process, END_SECONDS)
        self._stack.close()

    def wait_ready(self) -> None:
        """Wait for the service's first test reply. Raises TeacherError: it ended, or `start_timeout` has passed."""
        timed_out = f"the teacher was not ready after {self._start_timeout}; its log: {self._log_path}"
        what, detail = "the teacher of this run to load its model", f"log: {self._log_path}"
        with waiting(what, self._start_timeout, lambda: detail, since=self._started):
            while not self._ready_file.exists():
                self.check()
                if time.monotonic() > self._started + self._start_timeout.seconds:
                    raise TeacherError(timed_out)
                time.sleep(0.1)
        if not self.address:
            log.info("the teacher of this run was ready after %.1f s", self._ready_file.stat().st_mtime - self._began)
        ready = json.loads(self._ready_file.read_text(encoding="utf-8"))
        self.address, self.worker_address = (f"127.0.0.1:{ready[key]}" for key in ("port", "worker_port"))

    def check(self) -> None:
        """Check that the service runs; restart one that was killed after it was ready.

        Raises TeacherError with its last error, or its last line and the signal.
        """
        code = self.poll()
        if code is None:
            return
        if code < 0 and self.address and self._ready_file.exists() and self._num_restarts < MAX_RESTARTS:
            self._restart(describe_exit(code))
            return
        lines = [
            line for line in self._log_path.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()
        ]
        lines = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
        last = lines[-1] if lines else "none"
        # An aborting library writes the reason to the log; a killed process does not.
        reason = last if lines and code >= 0 else f"it {describe_exit(code)}; its last line: {last}"
        what = "ended" if self.address else "did not start"
        raise TeacherError(f"the teacher {what}: {reason}; its log: {self._log_path}")

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code of the service; None while it runs."""
        return None if self._process is None else self._process.poll()


def describe_exit(code: int) -> str:
    """Describe the return code of a subprocess."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def stop_process(process: subprocess.Popen[bytes], grace_period: float) -> None:
    """Stop a child that leads a session, and all processes of the session: SIGTERM, then SIGKILL."""
    for number, seconds in ((signal.SIGTERM, grace_period), (signal.SIGKILL, KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        if process.poll() is None or members(process.pid):
            with contextlib.suppress(ProcessLookupError):  # the last process has just ended
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            wait_for_end(process.pid, deadline - time.monotonic())
    if left := members(process.pid):
        log.warning("processes of the teacher still running: %s", ", ".join(map(str, sorted(left))))


def child_environment() -> dict[str, str]:
    """Return this process's environment, with this package on the child's PYTHONPATH."""
    root = str(Path(hybrid_gkd.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root, "PYTHONUNBUFFERED": "1"}

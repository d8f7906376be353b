"""Supervisor of the worker processes of `serve`: assigns GPUs, restarts failed processes, stops all in the end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass

from hybrid_gkd.errors import TeacherError
from hybrid_gkd.teacher.server.broker import Broker
from hybrid_gkd.teacher.server.local import child_environment, describe_exit, stop_process

log = logging.getLogger("hybrid_gkd.teacher")

MAX_USELESS_STARTS = 5
"""Consecutive starts of a worker without a single result after which the service gives up."""
MAX_BACKOFF_SECONDS = 30.0
END_SECONDS = 10.0
"""Grace period for workers to end. Tensor-parallel ranks take up to 8 s and leak shared memory if they are killed."""


@dataclass(eq=False)
class Slot:
    """Slot of one worker process and its replacements."""

    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    """Current process; None: to be started at `start_at`."""
    start_at: float = 0.0
    has_delivered: bool = False
    """Whether the current process has sent a result."""
    num_useless: int = 0
    """Number of previous processes in a row without a result."""


class Supervisor:
    """Keeps one process of `command` running per environment, which is added to this process's own."""

    def __init__(self, broker: Broker, command: list[str], environments: list[dict[str, str]]):
        self._broker, self._command = broker, command
        self.has_started = False
        """Whether all workers have passed their test; before that, a worker's end stops the service."""
        self.slots = [Slot(environment) for environment in environments]

    def check(self) -> None:
        """Start and restart workers; called several times per second. Raises TeacherError: no worker can be started."""
        now = time.monotonic()
        self.has_started = self.has_started or self._broker.num_workers >= len(self.slots)
        for slot in self.slots:
            if slot.process is None:
                if now >= slot.start_at:
                    # A separate session: Ctrl-C in a terminal reaches only this process, which then stops the worker.
                    slot.process = subprocess.Popen(
                        self._command, stdin=subprocess.DEVNULL, start_new_session=True,
                        env=child_environment() | slot.environment,
                    )
                continue
            name = f"{socket.gethostname()}:{slot.process.pid}"
            slot.has_delivered = slot.has_delivered or self._broker.num_delivered(name) > 0
            code = slot.process.poll()
            if code is None:
                continue
            how = describe_exit(code)
            slot.num_useless = 0 if slot.has_delivered else slot.num_useless + 1
            hopeless = slot.num_useless > MAX_USELESS_STARTS and not self._broker.num_workers
            if not self.has_started or hopeless:
                raise WorkerFailed(how, reported=code == 1)
            wait = min(MAX_BACKOFF_SECONDS, 2.0 ** (slot.num_useless - 1)) if slot.num_useless else 0.0
            log.warning("worker process %d %s, restarting in %.0f s", slot.process.pid, how, wait)
            slot.process, slot.start_at, slot.has_delivered = None, now + wait, False

    def stop(self) -> None:
        started = [slot.process for slot in self.slots if slot.process is not None]
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # signal all of them first, then wait for each
        deadline = time.monotonic() + END_SECONDS
        for process in started:
            stop_process(process, grace_period=max(0.0, deadline - time.monotonic()))


class WorkerFailed(TeacherError):
    """No worker can be started. `reported`: whether the worker has printed the reason itself."""

    def __init__(self, how: str, *, reported: bool):
        super().__init__(f"the teacher's worker {how}")
        self.reported = reported


def assign_gpus(num_workers: int, tp_size: int, device: str) -> list[dict[str, str]]:
    """Return the CUDA_VISIBLE_DEVICES of each worker, `tp_size` GPUs each. Raises TeacherError: too few GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if num_workers == 1 or device == "cpu" or (device == "auto" and not visible_gpus()):
        return [{}] * num_workers  # inherit this process's setting
    gpus = visible_gpus()
    if len(gpus) < num_workers * tp_size:
        raise TeacherError(
            f"--workers {num_workers} with --tp-size {tp_size} needs {num_workers * tp_size} GPUs, {len(gpus)} are "
            f"visible (CUDA_VISIBLE_DEVICES={'not set' if visible is None else visible})"
        )
    starts = range(0, num_workers * tp_size, tp_size)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[start : start + tp_size])} for start in starts]


def visible_gpus() -> list[str]:
    """Return the GPUs of this process in order, in the notation of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    import torch  # takes several seconds

    return [str(index) for index in range(torch.cuda.device_count())]

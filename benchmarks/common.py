"""Helpers of several benchmarks: programs that run to their end, processes, and the name of the machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def call(command: list[Any], log: Path, deadline: float, **environment: str) -> None:
    """Run a command to its end, its output into a file. Raises SystemExit with the end of it."""
    seconds = deadline - time.monotonic()
    with open(log, "w", encoding="utf-8") as out:
        if seconds <= 0:
            raise SystemExit("not started: no time was left")
        process = subprocess.Popen(
            [str(part) for part in command], cwd=ROOT, env={**os.environ, **ENVIRONMENT, **environment}, stdout=out,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except BaseException as error:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise SystemExit(f"not at its end after {seconds:.0f} s: {tail(log)}") from None
            raise
    if code:
        raise SystemExit(f"exit code {code}: {tail(log)}")


def tail(log: Path) -> str:
    """The last lines of a file."""
    return "\n".join(["", *log.read_text(errors="replace", encoding="utf-8").splitlines()[-30:]])


def device_name(device: str) -> str:
    """Return the name that the report shows."""
    if device == "cpu":
        return "CPU"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def own_process() -> ProcessPoolExecutor:
    """A process that has none of this one's threads and GPU memory."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

"""Kill parts of a supervised run, chosen by a seed, and print how long each kind of loss holds it up.

    .venv/bin/python benchmarks/endurance.py --kills 30

The run trains a tiny student from a tiny teacher on this machine's CPU with `--supervise`. A part is killed by SIGKILL
when the run has trained at least two steps since the last one. The seconds are those until it has trained a step that
it had not reached before; a larger run takes as long as its models take to load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hybrid_gkd.reporting.starts import reliability, rows_of_starts
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.teacher.server.local import child_environment
from hybrid_gkd.testing import make_tiny_model

TIMEOUT = 600.0
"""Seconds within which the run has to continue after each loss."""
PARTS: dict[str, Callable[[str], bool]] = {
    "driver": lambda line: "-m hybrid_gkd " in line and "--supervise" not in line,
    "worker": lambda line: line.startswith("ray::Worker"),
    "teacher's worker": lambda line: "hybrid_gkd.teacher join" in line,
    "teacher's broker": lambda line: "hybrid_gkd.teacher serve" in line,
    "raylet": lambda line: "raylet/raylet " in line,
    "control store": lambda line: "gcs_server " in line,
}
"""Part of a run -> whether a process with this command line is it."""
RESTARTED_BY_THE_RUN = ("teacher's worker", "teacher's broker")
"""Parts whose loss the run does not count as a restart."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if the run ended by itself or did not continue."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    chosen = random.Random(options.seed)
    parts = [part for _ in range(-(-options.kills // len(options.parts))) for part in options.parts][: options.kills]
    chosen.shuffle(parts)
    with tempfile.TemporaryDirectory(prefix="endurance_") as folder:
        run_dir = Path(folder) / "hybrid_gkd" / "gkd"
        with open(Path(folder) / "console.log", "w", encoding="utf-8") as console:
            process = subprocess.Popen(
                command(Path(folder)), stdout=console, stderr=console, env=child_environment(), start_new_session=True
            )
        try:
            seconds = kill_all(process, run_dir, parts)
        except TimeoutError as error:
            print(error, (run_dir.parents[1] / "console.log").read_text(encoding="utf-8")[-4000:], sep="\n")
            return 1
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT)
        print_table(seconds, reliability(run_dir))
    return 0


def command(folder: Path) -> list[str]:
    """Return the command line of the run, whose models and data are written into `folder`."""
    student, teacher = (make_tiny_model(folder / name, seed=seed) for seed, name in enumerate(("student", "teacher")))
    rows = "".join(json.dumps({"prompt": f"What is {number} + {number}?"}) + "\n" for number in range(64))
    (folder / "train.jsonl").write_text(rows, encoding="utf-8")
    return [
        sys.executable, "-m", "hybrid_gkd", "--supervise", f"actor_rollout_ref.model.path={student}",
        f"actor_rollout_ref.teacher.model.path={teacher}", f"data.train_files={folder}/train.jsonl",
        "data.train_batch_size=8", "data.max_prompt_length=32", "data.max_response_length=16", "distillation.topk=16",
        "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.teacher.backend=hf", "trainer.logger=[]",
        "trainer.total_training_steps=1000000", "trainer.save_freq=5", "trainer.device=cpu",
        "trainer.max_restarts=1000", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip


def kill_all(process: subprocess.Popen[bytes], run_dir: Path, parts: list[str]) -> dict[str, list[float]]:
    """Kill the parts one after the other; return the seconds until the run continued, by part."""
    seconds: dict[str, list[float]] = {part: [] for part in parts}
    wait_for_step(process, run_dir, 2)
    for part in parts:
        victims = find(process.pid, part)
        while not victims:
            time.sleep(0.1)
            victims = find(process.pid, part)
        step, number, killed = last_step(run_dir), len(restarts(run_dir)), time.monotonic()
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        if part not in RESTARTED_BY_THE_RUN:  # it may train further until it notices
            wait_for(process, lambda before=number: len(restarts(run_dir)) > before, "a restart")
            step = restarts(run_dir)[-1]["failed_step"] - 1
        wait_for_step(process, run_dir, step + 1)
        seconds[part].append(time.monotonic() - killed)
        wait_for_step(process, run_dir, step + 2)
    return seconds


def restarts(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of_starts(run_dir) if "restart" in row]


def find(root: int, part: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if PARTS[part](" ".join(child.cmdline())):
                found.append(child)
    return found


def last_step(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return int(max((row["step"] for row in read_json_lines(file)), default=0)) if file.is_file() else 0


def wait_for_step(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    wait_for(process, lambda: last_step(run_dir) >= step, f"step {step}")


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition. Raises TimeoutError: the run has ended, or TIMEOUT has passed."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if process.poll() is not None:
            raise TimeoutError(f"the run ended with code {process.returncode} before {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {TIMEOUT:.0f} s")
        time.sleep(0.1)


def print_table(seconds: dict[str, list[float]], lost: dict[str, float]) -> None:
    print("| killed | times | s until the next step, median | longest |", "|---|---|---|---|", sep="\n")
    for part, each in seconds.items():
        print(f"| {part} | {len(each)} | {statistics.median(each):.1f} | {max(each):.1f} |")
    print(", ".join(f"{name}={value:.0f}" for name, value in lost.items()) or "no restart")


if __name__ == "__main__":
    sys.exit(main())

"""Kill parts of a supervised run at random moments and compare its end with an undisturbed one; or train for long.

    .venv/bin/python benchmarks/endurance.py kills --kills 60 --steps 300
    .venv/bin/python benchmarks/endurance.py soak --steps 5000

Both train a tiny student from a tiny teacher on this machine's CPU. `kills` chooses parts, steps and moments by a seed,
some of them during the start after a loss. It prints how long each kind of loss holds the run up, and fails unless the
run ends by itself with the weights, the optimizer state and the losses of an undisturbed one and leaves nothing behind.
A larger run takes as long as its models take to load. `soak` prints the growth per 1000 steps of each process, file and
duration, by least squares over the samples after the first fifth, and fails where a process' memory grows by 1 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hybrid_gkd.reporting.report.page import page_data
from hybrid_gkd.reporting.report.run_folder import RunFolder
from hybrid_gkd.reporting.starts import read_starts, reliability, rows_of_starts
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.teacher.server.local import child_environment
from hybrid_gkd.testing import make_tiny_model

TIMEOUT = 600.0
"""Seconds without a new step after which a run counts as hung."""
END_SECONDS = 10.0
"""Seconds for the last processes to disappear."""
SUPERVISED = """
import sys
from hybrid_gkd import __main__
from hybrid_gkd.launch import supervise
supervise.LONGEST_PAUSE = supervise.FIRST_PAUSE
sys.exit(__main__.main(sys.argv[1:]))
"""
"""Code of a supervised run whose pauses before a restart do not become longer."""
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
"""Parts whose loss costs no step, once the run has started."""
REPLACED_BY_THE_RUN = (*RESTARTED_BY_THE_RUN, "worker")
"""Parts whose loss does not end the driver."""
TWICE = "two, the second one during the restart"
TWICE_FRACTION = 1 / 6
"""Probability that a loss that ends the driver is followed by one during the restart."""
STEP_SECONDS, START_SECONDS = 0.3, 15.0
"""Longest delay of a loss after a step, and after the beginning of a restart."""
SAMPLE_SECONDS = 5.0
"""Seconds between two samples of a soak."""
MEMORY_BOUND = 1.0
"""MiB per 1000 steps."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A part is killed `delay` seconds after `step`; `second`, if any, `second_delay` after the restart began."""

    part: str
    step: int
    delay: float
    second: str | None
    second_delay: float


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if the run did not do as it has to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "soak"])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, help="default: 300 with kills, 5000 of a soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="end_") as folder:
        for seed, name in enumerate(("student", "teacher")):
            make_tiny_model(Path(folder) / name, seed=seed)
        rows = "".join(json.dumps({"prompt": f"What is {number} + {number}?"}) + "\n" for number in range(64))
        (Path(folder) / "train.jsonl").write_text(rows, encoding="utf-8")
        if options.what == "soak":
            return soak(Path(folder), options.steps or 5000)
        steps = options.steps or 300
        return compare(Path(folder), plan_losses(options, steps), steps)


@contextlib.contextmanager
def running(folder: Path, name: str, steps: int, code: list[str], *own: str) -> Iterator[Run]:
    """Run a command with its temporary files in `folder`/t; end it after the block, and print its log if that fails."""
    command = [
        sys.executable, *code, f"actor_rollout_ref.model.path={folder}/student",
        f"actor_rollout_ref.teacher.model.path={folder}/teacher", f"data.train_files={folder}/train.jsonl",
        "data.max_prompt_length=32", "distillation.topk=16", "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.teacher.backend=hf", "trainer.logger=[]", "trainer.device=cpu", "trainer.max_restarts=1000",
        f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder / name}", *own,
    ]  # fmt: skip
    (folder / "t").mkdir(exist_ok=True)
    log = folder / f"{name}.log"
    with open(log, "w", encoding="utf-8") as console:
        environment = child_environment() | {"TMPDIR": str(folder / "t")}
        process = subprocess.Popen(command, stdout=console, stderr=console, env=environment, start_new_session=True)
    run = Run(process, folder / name / "hybrid_gkd" / "gkd")
    try:
        yield run
    except TimeoutError as error:
        print(error, log.read_text(encoding="utf-8")[-6000:], sep="\n")
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)


class Run:
    """A run that has been started."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path):
        self.process, self.folder = process, folder

    def wait(self, what: str, condition: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a condition or the end of the run; return whether it still runs.

        Raises TimeoutError: no new step within TIMEOUT.
        """
        step, deadline = self.step(), time.monotonic() + TIMEOUT
        while not condition():
            if self.process.poll() is not None:
                return False
            if self.step() != step:
                step, deadline = self.step(), time.monotonic() + TIMEOUT
            if time.monotonic() > deadline:
                raise TimeoutError(f"no new step within {TIMEOUT:.0f} s while waiting for {what}")
            time.sleep(0.1)
        return True

    def step(self) -> int:
        """Return the last reported step, from the end of metrics.jsonl."""
        try:
            with open(self.folder / "metrics.jsonl", "rb") as file:
                file.seek(-min(20_000, file.seek(0, os.SEEK_END)), os.SEEK_END)
                return max((int(step) for step in re.findall(rb'^{"step": (\d+),.*}$', file.read(), re.M)), default=0)
        except FileNotFoundError:
            return 0

    def is_ready(self) -> bool:
        start = read_starts(self.folder)[-1]
        return "ready" in start and "end" not in start

    def restarts(self) -> list[dict[str, Any]]:
        return [row for row in rows_of_starts(self.folder) if "restart" in row]

    def find(self, part: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if PARTS[part](" ".join(child.cmdline())):
                    found.append(child)
        return found

    def kill(self, part: str) -> int:
        """Kill a part. Where that ends the run, wait for the restart, and return the last step before it, else 0."""
        restarts = len(self.restarts())
        if not self.wait(part, lambda: bool(self.find(part))):
            return 0
        for victim in self.find(part):
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        # It may train further until it notices.
        if part in RESTARTED_BY_THE_RUN or not self.wait("a restart", lambda: len(self.restarts()) > restarts):
            return 0
        return int(self.restarts()[-1]["failed_step"]) - 1


# Kills


def plan_losses(options: argparse.Namespace, steps: int) -> list[Loss]:
    """Return the losses of a seed by rising step; each part is killed about equally often."""
    chosen, number = random.Random(options.seed), options.kills
    parts = [part for _ in range(-(-number // len(options.parts))) for part in options.parts][:number]
    chosen.shuffle(parts)
    losses: list[Loss] = []
    while parts:
        part, second = parts.pop(), None
        if parts and part not in REPLACED_BY_THE_RUN and chosen.random() < TWICE_FRACTION:
            second = parts.pop()
        losses.append(Loss(part, 0, chosen.uniform(0, STEP_SECONDS), second, chosen.uniform(0, START_SECONDS)))
    # The last quarter is left for the steps that a run trains until it notices a loss, which delay the following ones.
    chosen_steps = sorted(chosen.sample(range(2, max(3 * steps // 4, len(losses) + 2)), len(losses)))
    return [dataclasses.replace(loss, step=step) for loss, step in zip(losses, chosen_steps, strict=True)]


def compare(folder: Path, losses: list[Loss], steps: int) -> int:
    """Train undisturbed and with the losses; print the table and what differs. Return the exit code."""
    own = ["data.train_batch_size=8", "data.max_response_length=16", "trainer.save_freq=5"]
    with running(folder, "undisturbed", steps, ["-m", "hybrid_gkd"], *own) as expected:
        expected.wait("its end")
    before, seconds = shared_memory(), defaultdict[str, list[float]](list)
    with running(folder, "killed", steps, ["-c", SUPERVISED, "--supervise"], *own) as run:
        furthest = 0
        for loss in losses:
            at = max(loss.step, furthest + 1)
            if not run.wait(f"step {at}", lambda at=at: run.step() >= at):
                break
            time.sleep(loss.delay)
            began = time.monotonic()
            furthest = max(run.step(), run.kill(loss.part))
            if loss.second is not None:
                due = time.monotonic() + loss.second_delay
                run.wait("a start", lambda due=due: time.monotonic() > due or run.is_ready())
                # A run gives up if the same step fails twice.
                run.wait(f"step {furthest + 1}", lambda at=furthest: not run.is_ready() or run.step() > at)
                furthest = max(furthest, run.kill(loss.second))
            run.wait(f"step {furthest + 1}", lambda at=furthest: run.step() > at)
            seconds[TWICE if loss.second else loss.part].append(time.monotonic() - began)
            names = " and ".join(filter(None, (loss.part, loss.second)))
            print(f"step {furthest}: {names}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        run.wait("its end")
    wrong = [f"exit code {run.process.returncode}"] if run.process.returncode else []
    if (done := sum(map(len, seconds.values()))) < len(losses):
        wrong.append(f"the run was complete after {done} of {len(losses)} losses: set more steps")
    wrong += differences(expected.folder, run.folder, steps) + left_behind(folder / "t", before)
    print("| killed | times | s until the next step, median | longest |", "|---|---|---|---|", sep="\n")
    for part, each in seconds.items():
        print(f"| {part} | {len(each)} | {statistics.median(each):.1f} | {max(each):.1f} |")
    print(", ".join(f"{name}={value:.0f}" for name, value in reliability(run.folder).items()) or "no restart")
    print("; ".join(wrong) or "weights, optimizer state and losses as undisturbed, nothing left behind")
    if wrong:
        print((folder / "killed.log").read_text(encoding="utf-8")[-6000:])
    return 1 if wrong else 0


def differences(expected: Path, run_dir: Path, steps: int) -> list[str]:
    """Return how the end of a run differs from the expected one."""

    def state(folder: Path) -> dict[str, Any]:
        file = folder / f"global_step_{steps}" / "manifest.json"
        files = json.loads(file.read_text(encoding="utf-8"))["files"] if file.is_file() else {}
        files.pop("trainer_state.json", None)  # has times
        rows = read_json_lines(folder / "metrics.jsonl")
        return {
            f"files of step {steps}": files,
            "steps and their losses": [(row["step"], row["actor/loss"], row["actor/grad_norm"]) for row in rows],
        }

    before, after = state(expected), state(run_dir)
    return [f"other {name} than undisturbed" for name in before if not before[name] or before[name] != after[name]]


def left_behind(temporary: Path, before: set[str]) -> list[str]:
    """Return what a run has left that has ended: processes, and files for sockets and shared memory."""
    deadline, memory = time.monotonic() + END_SECONDS, shared_memory() - before
    while (processes_with(str(temporary)) or memory) and time.monotonic() < deadline:
        time.sleep(0.1)
        memory &= shared_memory()  # without what other programs had just made
    left = {
        "processes": processes_with(str(temporary)), "shared memory": sorted(memory),
        "files": sorted(str(file.relative_to(temporary)) for file in temporary.rglob("*")),
    }  # fmt: skip
    return [f"{name} left behind: {', '.join(found)}" for name, found in left.items() if found]


def processes_with(folder: str) -> list[str]:
    """Return the names of processes with the folder in their arguments, environment or open files."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values(), *(file.path for file in process.open_files())]
            found += [process.name()] if any(folder in word for word in words) else []
    return found


def shared_memory() -> set[str]:
    """Return the entries of /dev/shm that no process uses."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
            used |= {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return {str(file) for file in Path("/dev/shm").glob("*")} - used


# Soak


def soak(folder: Path, steps: int) -> int:
    """Train for many steps and print what grows; return the exit code."""
    samples: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    own = [
        "data.train_batch_size=4", "data.max_response_length=4", f"trainer.save_freq={max(steps // 50, 1)}",
        "trainer.max_actor_ckpt_to_keep=2",
    ]  # fmt: skip
    with running(folder, "soak", steps, ["-m", "hybrid_gkd"], *own) as run:
        if not run.wait("its start", lambda: run.step() > 0):
            raise TimeoutError("the run ended")
        page = RunFolder(run.folder)
        while True:
            due = time.monotonic() + SAMPLE_SECONDS
            if not run.wait("a sample", lambda due=due: time.monotonic() > due):
                break
            step, values = run.step(), look(run, page, folder)
            if run.step() < steps:  # not in its shutdown
                for key, value in values.items():
                    samples[key].append((step, value))
    rows = list(read_json_lines(run.folder / "metrics.jsonl"))
    for name in ("timing/step", "timing/other", "timing/save_checkpoint"):
        samples["seconds", name] = [(row["step"], row[name]) for row in rows if name in row]
    print(f"{run.step()} steps in {rows[-1]['timing/elapsed']:.0f} s, exit code {run.process.returncode}")
    print("last value, and growth per 1000 steps")
    grown = {key: growth(points, steps) for key, points in samples.items()}
    for columns in (("private MiB", "/dev/shm MiB", "threads", "file handles"), ("MiB", "seconds", "number")):
        print(f"| of | {' | '.join(columns)} |", "|---|" + "---|" * len(columns), sep="\n")
        for of in sorted({of for what, of in grown if what in columns}):
            keys = [(what, of) for what in columns]
            cells = (f"{samples[key][-1][1]:.4g} {grown[key]:+.3f}" if key in grown else "" for key in keys)
            print(f"| {of} | {' | '.join(cells)} |")
    much = [of for (what, of), slope in grown.items() if what == "private MiB" and slope >= MEMORY_BOUND]
    print(f"memory grows: {', '.join(much)}" if much else f"no process grows by {MEMORY_BOUND:g} MiB")
    return 1 if much or run.process.returncode else 0


def growth(points: list[tuple[float, float]], steps: int) -> float:
    """Return the slope per 1000 steps of the samples after the first fifth; NaN with fewer than three."""
    at, values = np.array([point for point in points if point[0] >= steps / 5]).reshape(-1, 2).T
    return float(1000 * np.polyfit(at, values, 1)[0]) if len(at) > 2 else math.nan


def look(run: Run, page: RunFolder, folder: Path) -> dict[tuple[str, str], float]:
    """Return values by what and of what: the run's processes and files, and the time to make its report."""
    values: dict[tuple[str, str], float] = {}
    number = Counter[str]()
    processes = psutil.Process(run.process.pid)
    for process in [processes, *processes.children(recursive=True)]:
        with contextlib.suppress(psutil.Error), process.oneshot():
            name = name_of(process, number)
            maps = process.memory_maps(grouped=False)
            values["private MiB", name] = sum(each.private_clean + each.private_dirty for each in maps) / 2**20
            values["/dev/shm MiB", name] = sum(each.rss for each in maps if "/dev/shm" in each.path) / 2**20
            values["threads", name], values["file handles", name] = process.num_threads(), process.num_fds()
    values["number", "processes"] = number.total()
    values["number", "/dev/shm entries"] = len(list(Path("/dev/shm").iterdir()))
    for root in (run.folder, folder / "t"):
        for at, _, names in os.walk(root):  # Path.rglob fails if the run removes a folder meanwhile
            for file in (Path(at, name) for name in names if "." in name):
                with contextlib.suppress(OSError):
                    if file.is_file() and "global_step" not in str(file) and "reserved" not in str(file):
                        name = f"{file.parent.name}/{file.name}" if root == run.folder else "Ray's logs"
                        values["MiB", name] = values.get(("MiB", name), 0) + file.stat().st_size / 2**20
    began = time.monotonic()
    page_data([page])
    values["seconds", "report"] = time.monotonic() - began
    return values


def name_of(process: psutil.Process, number: Counter[str]) -> str:
    """Return a name that is the same in every sample: the part of the run, or a program and its number."""
    line = process.cmdline()
    name = next((part for part, is_it in PARTS.items() if is_it(" ".join(line) + " ")), None)
    if name is None:
        words = [Path(word).name for word in line if not word.startswith("-")]
        name = " ".join(words[:2])[:40] if words else process.name()
        name = "report" if "hybrid_gkd.report" in line else "guard" if words[:1] == ["sh"] else name
    number[name] += 1
    return name if number[name] == 1 else f"{name} {number[name]}"


if __name__ == "__main__":
    sys.exit(main())

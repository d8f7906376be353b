"""Run what needs four GPUs, what fails most easily first; print one table, and stop in time.

    python benchmarks/four_gpus.py --minutes 28 --folder /tmp/four
    python benchmarks/four_gpus.py --device cpu --minutes 60         # tiny models, hf engines: a functional test
    python benchmarks/four_gpus.py --only sharded lost

Random weights in the shapes of Qwen2.5. `--folder` keeps models, runs and logs. What needs fewer GPUs runs at the same
time as others on the rest. By the first word of a row:

    sharded     a student of 7B on four GPUs from a teacher of 7B on the same ones, all offloads: three steps with one,
                two and four GPUs for each rollout engine, each publish verified; then on two from the state of four,
                with the teacher on a third
    lost        a worker is killed within an update and replaced, twice, in separate pools one of each; then another
                one is killed or, in the separate pools, a rollout worker is stopped, and the run ends
    training    tokens per second; 7B with gradient checkpointing, and without it in smaller micro-batches
    sync        weights from one GPU to three: packed broadcasts, and one per tensor
    hybrid      whole steps of 1.5B from 7B with both in turns on the same GPUs
    separate    the same with GPUs of their own for training and rollout

Lengths of whole steps are log-normal; on the CPU, and elsewhere, geometric (schedules.py). Figures of a run are medians
over the steps that generate, without the first two; memory is measured (planned).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from common import call, device_name, own_process
from schedules import make_inputs

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.reporting.logs import RUN_LOG
from hybrid_gkd.reporting.starts import rows_of_starts
from hybrid_gkd.runtime.files import read_json_lines

COLUMNS = ("step", "gen", "update_actor", "wait_prev_teacher", "sync_rollout_weights")
ROLLOUT = "actor_rollout_ref.rollout"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
SEPARATE = "actor_rollout_ref.hybrid_engine=false"
LENGTHS = "300,0.8,2048"
"""Log-normal lengths of whole steps, see answer_lengths.py."""
WARMUP = 2
LOST_STEPS = (2, 4, 6)
TRAINING = {
    # shape: name -> arguments of training.py
    "7b": {
        "checkpointing": ["--variants", "eager+checkpointing"],
        "micro-batches of 8k": ["--variants", "eager", "--micro-batch-tokens", "8192", "--micro-batches", "8"],
    },
    "1.5b": {"": ["--variants", "eager"]},
}


class Bench:
    """Parts that print rows until a deadline."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.on_cpu = args.device == "cpu"
        self.deadline = time.monotonic() + 60 * args.minutes
        self.models: dict[tuple[str, str], list[str]] = {}
        """Student and teacher -> overrides."""

    def row(self, name: str, figures: str) -> None:
        print(f"| {name} | {figures} |", flush=True)

    def attempt(self, name: str, command: list[Any], gpus: tuple[int, ...], *, fails: bool = False) -> bool:
        """Run a command on some of the GPUs; print a row about its end unless it ends as expected. Return whether it
        did."""
        environment = {"ANSWER_LENGTHS": LENGTHS}
        environment |= {} if self.on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        log, end = self.log(name), "exit code 0: "
        try:
            call(command, log, min(self.deadline, time.monotonic() + 60 * self.args.part_minutes), **environment)
        except SystemExit as error:
            end = str(error)
        if end.startswith(f"exit code {int(fails)}: "):
            return True
        reason, _, text = end.partition(": ")  # an exit code or the deadline, then the log's last lines
        self.row(name, f"failed, {reason}: {' '.join(text.split())[-300:]}")
        return False

    def log(self, name: str) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9.]+', '_', name.lower())}.log"

    def inputs(self, student: str, teacher: str) -> list[str]:
        """Return the overrides that name models and prompts, which the first call makes."""
        if self.on_cpu:
            student = teacher = "tiny"
        if (student, teacher) not in self.models:
            shapes = argparse.Namespace(
                student_shape=student, teacher_shape=teacher, mean_length=16 if self.on_cpu else 512,
                schedules=["sync"], steps=16, warmup=0, prompts=self.prompts, prompt_length=self.prompt_length,
            )  # fmt: skip
            with own_process() as process:  # its memory of a GPU is free again
                self.models[student, teacher] = process.submit(make_inputs, shapes, self.folder).result()
        return self.models[student, teacher]

    @property
    def prompts(self) -> int:
        """Prompts of a step on all GPUs."""
        return 8 if self.on_cpu else 256

    @property
    def prompt_length(self) -> int:
        return 16 if self.on_cpu else 128

    def settings(self, name: str, workers: int, steps: int, *own: str) -> list[str]:
        """Return the overrides of a run."""
        engines = [f"{ROLLOUT}.name=hf", "actor_rollout_ref.teacher.backend=hf"] if self.on_cpu else []
        return [
            f"trainer.device={self.args.device}", f"trainer.n_gpus_per_node={workers}", "trainer.logger=[jsonl]",
            f"trainer.experiment_name={self.log(name).stem}", f"trainer.total_training_steps={steps}", *engines,
            f"data.train_batch_size={self.prompts}", f"data.max_prompt_length={self.prompt_length + 8}",
            f"data.max_response_length={32 if self.on_cpu else 2048}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}", *own,
        ]  # fmt: skip

    def run(self, name: str, overrides: list[str], gpus: tuple[int, ...], *, fails: bool = False) -> Path | None:
        """Train; return the run's folder, or None after an end that was not expected, which is printed."""
        command = [sys.executable, "-m", "hybrid_gkd", "--config-name", "gkd", *overrides]
        if not self.attempt(name, command, gpus, fails=fails):
            return None
        return load_config(overrides, config_name="gkd").run_dir


Job = Callable[[Bench, str, tuple[int, ...]], None]


def sharded(
    bench: Bench, name: str, gpus: tuple[int, ...], *, workers: int, engine: int = 1, resumes: bool = False,
) -> None:  # fmt: skip
    """Train a student of 7B; the first run saves its state, which a later one resumes."""
    engine = 1 if bench.on_cpu else engine
    saves = f"trainer.save_freq={3 if engine == 1 and not resumes else 0}"
    own = [f"{ROLLOUT}.tensor_model_parallel_size={engine}", f"{ROLLOUT}.verify_weights=true", CHECKPOINTING, saves]
    own += ["actor_rollout_ref.actor.optim.lr=1e-4"]  # each publish differs from the one before
    own += ["trainer.allow_changed_config=true"] if resumes else []
    run_name, steps = ("sharded, engines of 1", 5) if resumes else (name, 3)
    overrides = [*bench.inputs("7b", "7b"), *bench.settings(run_name, workers, steps, *own)]
    if (folder := bench.run(name, overrides, gpus)) is not None:
        bench.row(name, f"{step_figures(folder, after=3 if resumes else 0)}; GiB: {memory_figures(folder)}")


def lost(bench: Bench, name: str, gpus: tuple[int, ...], *, generating: int = 0) -> None:
    """Kill workers within updates until a run gives up; of separate pools one of each, then stop a rollout worker."""
    own = [SEPARATE, f"rollout.n_gpus_per_node={generating}"] if generating else []
    own += ["trainer.max_restarts=2", "trainer.save_freq=2", "actor_rollout_ref.nccl_timeout=60"]
    settings = bench.settings(name, len(gpus) - generating, 10, "actor_rollout_ref.actor.optim.lr=1e-12", *own)
    overrides = [*bench.inputs("1.5b", "7b"), *settings]
    folder, faults = load_config(overrides, config_name="gkd").run_dir, list[float]()
    events = [(step, signal.SIGKILL, not generating or step == LOST_STEPS[0]) for step in LOST_STEPS]
    if generating:
        events[-1] = (LOST_STEPS[-1], signal.SIGSTOP, False)
    threading.Thread(target=disturb, args=(folder, events, faults, bench.deadline), daemon=True).start()
    if bench.run(name, overrides, gpus, fails=True) is None:
        return
    if len(faults) < len(events):
        return bench.row(name, f"failed: it ended after {len(faults)} of {len(events)} faults, see {bench.log(name)}")
    seconds = time.monotonic() - faults[-1]
    parts = [
        f"step {row['failed_step']} again after {row['seconds_down']:.0f} s, {row['steps_repeated']} steps repeated "
        f"({row['reason'][:120]})" for row in rows_of_starts(folder) if "restart" in row
    ]  # fmt: skip
    end = re.findall(r"^error: .*", bench.log(name).read_text(encoding="utf-8", errors="replace"), re.M)
    saved = sorted(int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*"))
    last = "the end" if events[-1][1] == signal.SIGKILL else "a stopped worker: the end"
    parts.append(f"{last} {seconds:.0f} s later, saved: {saved}, {' '.join(end)[:240] or 'no error is named'}")
    return bench.row(name, "; ".join(parts))


def disturb(folder: Path, events: list[tuple[int, signal.Signals, bool]], faults: list[float], deadline: float) -> None:
    """Send a signal within the update after each given step, to a worker that trains or to another one; note when."""
    for step, event, trains in events:
        row, updating, others = None, list[int](), list[int]()
        while row is None or not updating:
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
            rows = list(read_json_lines(folder / "metrics.jsonl")) if (folder / "metrics.jsonl").is_file() else []
            row = next((each for each in rows if each["step"] >= step and "timing/gen" in each), None)
            updating, others = workers()
        time.sleep(row["timing/update_actor"] / 2)
        os.kill((updating if trains else others)[0], event)
        faults.append(time.monotonic())


def workers() -> tuple[list[int], list[int]]:
    """Return the pids of this process' workers that are in an update, and of the others; Ray names them by the call."""
    updating, others = list[int](), list[int]()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            title = " ".join(process.cmdline()[:1])
            if title.startswith("ray::Worker"):
                (updating if title.startswith("ray::Worker.update") else others).append(process.pid)
    return updating, others


def sync(bench: Bench, name: str, gpus: tuple[int, ...], *, shape: str) -> None:
    """Broadcast weights from one GPU to the others."""
    if bench.on_cpu:
        shape = "tiny"
    command = ["benchmarks/weight_sync.py", "--shape", shape, "--gpus", str(len(gpus)), "--device", bench.args.device]
    copied_rows(bench, name, [sys.executable, *command], gpus)


def training(bench: Bench, name: str, gpus: tuple[int, ...], *, shape: str, variant: str = "") -> None:
    """Measure updates."""
    if bench.on_cpu:
        return bench.row(name, "left out: it needs GPUs")
    command = ["benchmarks/training.py", "--shape", shape, "--model", bench.folder / f"student-{shape}"]
    return copied_rows(
        bench, name, [sys.executable, *command, "--gpus", str(len(gpus)), *TRAINING[shape][variant]], gpus
    )


def copied_rows(bench: Bench, name: str, command: list[Any], gpus: tuple[int, ...]) -> None:
    """Run another benchmark and print the rows of its table."""
    if bench.attempt(name, command, gpus):
        lines = bench.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        for line in dict.fromkeys(line for line in lines if line.startswith("| ") and not line.startswith("| |")):
            bench.row(name, line.strip("| "))


def whole_steps(bench: Bench, name: str, gpus: tuple[int, ...], *, workers: int, generating: int = 0) -> None:
    """Measure whole steps of 1.5B from 7B; the teacher has the GPUs that the pools leave, or shares the student's."""
    own = [f"trainer.scheduler={name.rpartition(' ')[2]}", "trainer.save_freq=0", "trainer.val_before_train=false"]
    own += [SEPARATE, f"rollout.n_gpus_per_node={generating}"] if generating else []
    if not bench.on_cpu:  # an engine by import path gets no part of the plan
        own += [f"{ROLLOUT}.name=answer_lengths:rollout_engine", f"{ROLLOUT}.gpu_memory_utilization=0.3"]
    own += ["actor_rollout_ref.actor.optim.lr=1e-12"]
    overrides = [*bench.inputs("1.5b", "7b"), *bench.settings(name, workers, 6, *own)]
    if (folder := bench.run(name, overrides, gpus)) is not None:
        bench.row(name, step_figures(folder))


def step_figures(folder: Path, after: int = 0) -> str:
    """Return the medians of a run's times and its throughput, of the steps after the one that it resumed from."""
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row["step"] > after]
    counted = [row for row in rows if "timing/gen" in row]  # not the last step of a schedule that generates ahead
    counted = counted[WARMUP:] or counted  # a resumed run may have few
    times = (f"{column} {statistics.median(row.get(f'timing/{column}', 0.0) for row in counted):.2f}"
             for column in COLUMNS)  # fmt: skip
    speed = statistics.median(row["perf/tokens_per_second"] for row in counted)
    return f"{', '.join(times)} s, {speed:.0f} tokens/s"


def planned_memory(folder: Path) -> dict[str, dict[str, float]]:
    """Return phase -> owner -> GiB on a worker of the last plan in the run's log."""
    log = (folder / RUN_LOG).read_text(encoding="utf-8")
    phases = re.findall(r"^  (\w+) +[\d.]+ = (.+)$", log, re.M)
    return {phase: {name: float(size) for name, _, size in (each.rpartition(" ") for each in owners.split(", "))}
            for phase, owners in phases}  # fmt: skip


def memory_figures(folder: Path) -> str:
    """Return measured and planned memory by owner, and the peak of the training process.

    The plan is what the phases need. Where there is room, the optimizer state arrives during the update's last backward
    pass, so that the peak has both.
    """
    plan, row = planned_memory(folder), list(read_json_lines(folder / "metrics.jsonl"))[-1]
    parts = []
    for name, value in row.items():
        _, phase, owner, *_ = [*name.removesuffix("_gb").split("/"), "", ""]
        if name.startswith("memory/") and owner in plan.get(phase, {}):
            parts.append(f"{phase} {owner} {value:.1f} ({plan[phase][owner]:.1f})")
    update = {name: size for name, size in plan["update"].items() if name not in ("teacher", "sleeping engine")}
    peak = sum(update.values()) + plan["optimizer_step"]["optimizer_state"]
    measured = row.get("perf/max_memory_allocated_gb", float("nan"))
    return f"{', '.join(parts)}; peak {measured:.1f} (update and optimizer state {peak:.1f})"


ALL = (0, 1, 2, 3)
ROUNDS: list[dict[str, tuple[tuple[int, ...], Job]]] = [
    # what runs at the same time: name -> GPUs, job
    {"sharded, engines of 1": (ALL, partial(sharded, workers=4))},
    {
        "sharded, resumed on 2, teacher on another": ((0, 1, 2), partial(sharded, workers=2, resumes=True)),
        "hybrid 1, teacher shared, one_step_off": ((3,), partial(whole_steps, workers=1)),
    },
    {"sharded, engines of 4": (ALL, partial(sharded, workers=4, engine=4))},
    {"lost, hybrid 4": (ALL, lost)},
    {"lost, separate 1+3": (ALL, partial(lost, generating=3))},
    {"training, 7b on 4, checkpointing": (ALL, partial(training, shape="7b", variant="checkpointing"))},
    {"training, 7b on 4, micro-batches of 8k": (ALL, partial(training, shape="7b", variant="micro-batches of 8k"))},
    {
        "training, 7b on 2, checkpointing": ((0, 1), partial(training, shape="7b", variant="checkpointing")),
        "hybrid 1, teacher shared, sync": ((2,), partial(whole_steps, workers=1)),
        "training, 1.5b on 1": ((3,), partial(training, shape="1.5b")),
    },
    {"training, 1.5b on 4": (ALL, partial(training, shape="1.5b"))},
    {
        "training, 1.5b on 2": ((0, 1), partial(training, shape="1.5b")),
        "hybrid 2, teacher shared, sync": ((2, 3), partial(whole_steps, workers=2)),
    },
    {"sync, 1.5b": (ALL, partial(sync, shape="1.5b"))},
    {"sync, 7b": (ALL, partial(sync, shape="7b"))},
    {"hybrid 4, teacher shared, sync": (ALL, partial(whole_steps, workers=4))},
    {"hybrid 4, teacher shared, one_step_off": (ALL, partial(whole_steps, workers=4))},
    {"separate 2+2, teacher shared, one_step_off": (ALL, partial(whole_steps, workers=2, generating=2))},
    {"separate 1+3, teacher shared, one_step_off": (ALL, partial(whole_steps, workers=1, generating=3))},
    {"separate 3+1, teacher shared, one_step_off": (ALL, partial(whole_steps, workers=3, generating=1))},
    {"hybrid 3, teacher on 1, sync": (ALL, partial(whole_steps, workers=3))},
    {"hybrid 3, teacher on 1, one_step_off": (ALL, partial(whole_steps, workers=3))},
    {
        "hybrid 2, teacher shared, one_step_off": ((2, 3), partial(whole_steps, workers=2)),
        "training, 7b on 1, checkpointing": ((0,), partial(training, shape="7b", variant="checkpointing")),
    },
    {"sharded, engines of 2": (ALL, partial(sharded, workers=4, engine=2))},
]
PARTS = list(dict.fromkeys(re.split("[ ,]", name)[0] for jobs in ROUNDS for name in jobs))


def main() -> None:
    """Run the parts and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], help=f"beginnings of rows, such as {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=28.0, help="for everything (%(default)s)")
    parser.add_argument("--part-minutes", type=float, default=8.0, help="for a process (%(default)s)")
    parser.add_argument("--folder", type=Path, help="of models, runs and logs; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor() as threads:
        bench = Bench(args, args.folder or Path(temporary))
        bench.folder.mkdir(parents=True, exist_ok=True)
        print(f"{device_name(args.device)}\n\n| part | figures |\n|---|---|", flush=True)
        for student in ("7b", "1.5b"):  # before jobs that run at the same time
            bench.inputs(student, "7b")
        for jobs in ROUNDS:
            chosen = {name: job for name, job in jobs.items() if name.startswith(tuple(args.only))}
            futures = [threads.submit(job, bench, name, gpus) for name, (gpus, job) in chosen.items()]
            for future in futures:
                future.result()


if __name__ == "__main__":
    main()

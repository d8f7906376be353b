"""Run what needs four GPUs, what fails most easily first; print one table, and stop in time.

    python benchmarks/four_gpus.py --minutes 28 --folder /tmp/four
    python benchmarks/four_gpus.py --device cpu --minutes 60         # tiny models, hf engines: a functional test
    python benchmarks/four_gpus.py --only sharded lost

Random weights in the shapes of Qwen2.5. `--folder` keeps the logs of the parts, which are processes of their own:

    sharded     a student of 7B on four GPUs from a teacher of 7B on the same ones, all offloads: three steps with one,
                two and four GPUs for each rollout engine, each publish verified; then on two from the state of four
    lost        a worker is killed twice and replaced, in one pool and in two (--gpus 2 for a rehearsal on two GPUs)
    sync        weights from one GPU to three: packed broadcasts, and one per tensor
    steps       whole steps of 1.5B from 7B by GPUs, pools, placement of the teacher and scheduler; lengths geometric
    training    tokens per second on one, two and four GPUs

Figures of a run are medians over its steps without the first two; "memory" is the largest sum of a phase and the
plan's for the same one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from common import call, device_name
from schedules import make_inputs

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.reporting.logs import RUN_LOG
from hybrid_gkd.reporting.starts import rows_of_starts
from hybrid_gkd.runtime.files import read_json_lines

COLUMNS = ("step", "gen", "update_actor", "wait_prev_teacher", "sync_rollout_weights")
ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = "actor_rollout_ref.hybrid_engine=false"
WARMUP = 2
STEPS = {
    # name: GPUs of the student, of the separate rollout pool, of the teacher (0: it shares the student's), scheduler
    "hybrid 4, teacher shared, sync": (4, 0, 0, "sync"),
    "hybrid 4, teacher shared, one_step_off": (4, 0, 0, "one_step_off"),
    "hybrid 3, teacher on 1, sync": (3, 0, 1, "sync"),
    "hybrid 3, teacher on 1, one_step_off": (3, 0, 1, "one_step_off"),
    "separate 1+3, teacher shared, one_step_off": (1, 3, 0, "one_step_off"),
    "separate 2+2, teacher shared, one_step_off": (2, 2, 0, "one_step_off"),
    "separate 3+1, teacher shared, one_step_off": (3, 1, 0, "one_step_off"),
    "hybrid 2, teacher shared, sync": (2, 0, 0, "sync"),
    "hybrid 2, teacher shared, one_step_off": (2, 0, 0, "one_step_off"),
    "hybrid 1, teacher shared, sync": (1, 0, 0, "sync"),
    "hybrid 1, teacher shared, one_step_off": (1, 0, 0, "one_step_off"),
}


class Bench:
    """Parts that print rows until a deadline."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.on_cpu = args.device == "cpu"
        self.deadline = time.monotonic() + 60 * args.minutes

    def row(self, name: str, figures: str) -> None:
        print(f"| {name} | {figures} |", flush=True)

    def attempt(self, name: str, command: list[Any], **environment: str) -> bool:
        """Run a command; print a row about its end if it fails. Return whether it succeeded."""
        log = self.folder / f"{name.replace(', ', '-').replace(' ', '_')}.log"
        try:
            call(command, log, min(self.deadline, time.monotonic() + 60 * self.args.part_minutes), **environment)
        except SystemExit as error:
            reason, _, end = str(error).partition(": ")  # an exit code or the deadline, then the log's last lines
            self.row(name, f"failed, {reason}: {' '.join(end.split())[-300:]}")
            return False
        return True

    def inputs(self, student: str, teacher: str, steps: int) -> list[str]:
        """Make models and prompts for a part; return the overrides that name them."""
        folder = self.folder / f"{student}_{teacher}"
        if self.on_cpu:
            student = teacher = "tiny"
        shapes = argparse.Namespace(
            student_shape=student, teacher_shape=teacher, mean_length=16 if self.on_cpu else 512, schedules=["sync"],
            steps=steps, warmup=0, prompts=self.prompts, prompt_length=self.prompt_length,
        )  # fmt: skip
        with contextlib.suppress(FileExistsError):  # of an earlier part
            folder.mkdir(parents=True)
            return remembered(folder, make_inputs(shapes, folder))
        return list(json.loads((folder / "inputs.json").read_text(encoding="utf-8")))

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
            f"trainer.experiment_name={name}", f"trainer.total_training_steps={steps}", *engines,
            f"data.train_batch_size={self.prompts}", f"data.max_prompt_length={self.prompt_length + 8}",
            f"data.max_response_length={32 if self.on_cpu else 2048}", "actor_rollout_ref.actor.optim.lr=1e-12",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}", *own,
        ]  # fmt: skip

    def run(self, name: str, overrides: list[str]) -> Path | None:
        """Train; return the run's folder, or None after a failure, which is printed."""
        if not self.attempt(name, [sys.executable, "-m", "hybrid_gkd", "--config-name", "gkd", *overrides]):
            return None
        return load_config(overrides, config_name="gkd").run_dir

    def sharded(self) -> None:
        """A student of 7B over four GPUs, and over two from the same checkpoint."""
        inputs, verify = self.inputs("7b", "7b", 16), f"{ROLLOUT}.verify_weights=true"
        for engine in (1, 2, 4) if not self.on_cpu else (1,):
            name, saves = f"sharded_tp{engine}", engine == 1
            own = [f"{ROLLOUT}.tensor_model_parallel_size={engine}", f"trainer.save_freq={3 if saves else 0}", verify]
            self.train_sharded(f"sharded, engines of {engine}", [*inputs, *self.settings(name, 4, 3, *own)])
            if saves:
                own = [*own, "trainer.save_freq=0", "trainer.allow_changed_config=true"]
                overrides = [*inputs, *self.settings(name, 2, 5, *own)]
                self.train_sharded("sharded, resumed on 2", overrides)

    def train_sharded(self, name: str, overrides: list[str]) -> None:
        if (folder := self.run(name, overrides)) is not None:
            self.row(name, f"{step_figures(folder)}; memory, GiB: {memory_figures(folder)}")

    def lost(self) -> None:
        """Kill a worker in each of two steps: of one pool, and one of each of two pools."""
        inputs, all_workers = self.inputs("1.5b", "7b", 16), self.args.gpus
        for generating in (0, all_workers // 2):
            training = all_workers - generating
            name = f"lost_{training}_{generating}"
            own = [SEPARATE, f"rollout.n_gpus_per_node={generating}"] if generating else []
            own += ["trainer.max_restarts=2", "trainer.save_freq=2"]
            overrides = [*inputs, *self.settings(name, training, 8, *own)]
            folder = load_config(overrides, config_name="gkd").run_dir
            killer = threading.Thread(target=kill_workers, args=(folder, (2, 4), self.deadline), daemon=True)
            killer.start()
            title = f"lost, separate {training}+{generating}" if generating else f"lost, hybrid {training}"
            if self.run(title, overrides) is not None:
                restarts = [row for row in rows_of_starts(folder) if "restart" in row]
                each = "; ".join(
                    f"step {row['failed_step']} again after {row['seconds_down']:.0f} s, {row['steps_repeated']} steps "
                    f"repeated ({row['reason'][:60]})" for row in restarts
                )
                self.row(title, each or "failed: no restart")

    def sync(self) -> None:
        """Broadcast weights from one GPU to three."""
        for shape in ("1.5b", "7b") if not self.on_cpu else ("tiny",):
            command = ["benchmarks/weight_sync.py", "--shape", shape, "--gpus", "4", "--device", self.args.device]
            self.copied_rows(f"sync, {shape}", [sys.executable, *command])

    def training(self) -> None:
        """Measure updates on one, two and four GPUs."""
        if self.on_cpu:
            return self.row("training", "left out: it needs GPUs")
        for shape in ("7b", "1.5b"):
            command = ["benchmarks/training.py", "--shape", shape, "--gpus", "4", "2", "1", "--variants", "compile"]
            self.copied_rows(f"training, {shape}", [sys.executable, *command])
        return None

    def copied_rows(self, name: str, command: list[Any]) -> None:
        """Run another benchmark and print the rows of its tables."""
        if self.attempt(name, command):
            log = self.folder / f"{name.replace(', ', '-').replace(' ', '_')}.log"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines:
                if line.startswith("| ") and not line.startswith("| |"):
                    self.row(name, line.strip("| "))

    def steps(self) -> None:
        """Measure whole steps."""
        inputs = self.inputs("1.5b", "7b", 16)
        for name, (workers, generating, apart, scheduler) in STEPS.items():
            visible = range(workers + generating + apart)
            own = [f"trainer.scheduler={scheduler}", "trainer.save_freq=0", "trainer.val_before_train=false"]
            own += [SEPARATE, f"rollout.n_gpus_per_node={generating}"] if generating else []
            environment = {} if self.on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))}
            overrides = [*inputs, *self.settings(name.replace(", ", "-").replace(" ", "_").replace("+", "_"), workers,
                                                 6, *own)]  # fmt: skip
            command = [sys.executable, "-m", "hybrid_gkd", "--config-name", "gkd", *overrides]
            if self.attempt(name, command, **environment):
                self.row(name, step_figures(load_config(overrides, config_name="gkd").run_dir))


def remembered(folder: Path, inputs: list[str]) -> list[str]:
    (folder / "inputs.json").write_text(json.dumps(inputs), encoding="utf-8")
    return inputs


def step_figures(folder: Path) -> str:
    """Return the medians of a run's times and its throughput."""
    rows = list(read_json_lines(folder / "metrics.jsonl"))
    counted = [row for row in rows if "timing/step" in row]
    counted = counted[WARMUP:] or counted  # a resumed run may have few
    times = (f"{column} {statistics.median(row.get(f'timing/{column}', 0.0) for row in counted):.2f}"
             for column in COLUMNS)  # fmt: skip
    speed = statistics.median(row["perf/tokens_per_second"] for row in counted)
    return f"{', '.join(times)} s, {speed:.0f} tokens/s"


def planned_memory(folder: Path) -> dict[str, float]:
    """Return the plan's GiB on a worker by phase, from the run's log."""
    log = (folder / RUN_LOG).read_text(encoding="utf-8")
    return {phase: float(size) for phase, size in re.findall(r"^  (\w+) +([\d.]+) = ", log, re.M)}


def memory_figures(folder: Path) -> str:
    """Return each phase's measured and planned memory."""
    planned = planned_memory(folder)
    row = list(read_json_lines(folder / "metrics.jsonl"))[-1]
    found: dict[str, float] = {}
    for name, value in row.items():
        if name.startswith("memory/"):
            found[name.split("/")[1]] = found.get(name.split("/")[1], 0.0) + value
    phases = (f"{phase} {found[phase]:.1f}, planned {planned[phase]:.1f}" for phase in found if phase in planned)
    return f"{'; '.join(phases)}; peak {row.get('perf/max_memory_allocated_gb', float('nan')):.1f}"


def kill_workers(folder: Path, after: tuple[int, ...], deadline: float) -> None:
    """Kill a worker of this process' run once each of these steps is reported."""
    for step in after:
        while time.monotonic() < deadline:
            file = folder / "metrics.jsonl"
            if file.is_file() and max((row["step"] for row in read_json_lines(file)), default=0) >= step:
                break
            time.sleep(0.2)
        workers = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("ray::Worker")]
        if workers:  # the first one started, then the last one: with two pools one of each
            max(workers, key=lambda each: (1 if step == after[-1] else -1) * each.create_time()).kill()


PARTS = ("sharded", "lost", "sync", "steps", "training")


def main() -> None:
    """Run the parts and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=4, help="of the part `lost` (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=28.0, help="for everything (%(default)s)")
    parser.add_argument("--part-minutes", type=float, default=6.0, help="for a process (%(default)s)")
    parser.add_argument("--folder", type=Path, help="of models, runs and logs; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args, args.folder or Path(temporary))
        bench.folder.mkdir(parents=True, exist_ok=True)
        print(f"{device_name(args.device)}\n\n| part | figures |\n|---|---|", flush=True)
        for part in args.only:
            getattr(bench, part)()


if __name__ == "__main__":
    main()

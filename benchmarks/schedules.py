"""Compare the schedules of a step: same prompts, seeds and lengths, one run after another on the same pools.

    python benchmarks/schedules.py --student-shape 1.5b --teacher-shape 7b --gpus 2 --prompts 256
    python benchmarks/schedules.py --config-name one_gpu --schedules sync --prompt-length 256 --response-length 512 \\
        --mean-length 100000
    python benchmarks/schedules.py --shape tiny --device cpu --prompts 16 --response-length 64 --mean-length 16

Random weights in the shapes of Qwen2.5. So many random tokens end a completion that its length is geometric with the
given mean, up to --response-length: most are short, few are long. The learning rate is too small to change a weight, so
all schedules generate and score the same completions. `--gpus` are the student's; the teacher takes the one after them,
or shares theirs. Separate pools split the student's in halves, or on the CPU take two processes instead of one.

Step: time from one publish to the next, from trace.json; median of the steps after the warm-up, as the other columns,
which are the metrics of the same name. The ideal is what the schedule could reach with the same parts:

    serial          G + Q + U + W            nothing at the same time
    sync            max(G + U, Q) + W        scoring overlaps generation and update
    one_step_off    max(G + U + W, Q)        scoring overlaps everything; two_step_off too
    separate ...    max(max(G, U) + W, Q)    generation and update overlap as well

with the schedule's own generation G, update U and publish W, and the serial run's time Q of the teacher for a whole
batch. Efficiency is ideal divided by measured step. If the serial run's update trains scored parts early, it is faster
than its formula. A teacher on a GPU of the student slows generation and update down, which the ideal does not show.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from models import SHAPES, full_tokenizer, make_model

from hybrid_gkd.config import BATCHES_AHEAD, Config, run_teachers
from hybrid_gkd.config.loading import load_config
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.preflight import check_all
from hybrid_gkd.launch.run import locked_run_folder, start_tracking
from hybrid_gkd.launch.teacher import connect, make_teacher_process
from hybrid_gkd.offload.needs import with_planned_caches
from hybrid_gkd.ppo.steps import total_steps as total_steps_of
from hybrid_gkd.reporting.trace import trace_recording
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.runtime.imports import freeze_gc
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.teacher.server.local import TeacherProcess
from hybrid_gkd.trainer import GKDTrainer
from hybrid_gkd.workers.cluster import ray_cluster
from hybrid_gkd.workers.group import WorkerGroup
from hybrid_gkd.workers.placement import threads_per_process

SCHEDULES = {
    "serial": ["trainer.scheduler=sync", "actor_rollout_ref.teacher.overlap_rollout=false"],
    "sync": ["trainer.scheduler=sync"],
    "one_step_off": ["trainer.scheduler=one_step_off"],
    "two_step_off": ["trainer.scheduler=two_step_off"],
    "separate_one_step_off": ["trainer.scheduler=one_step_off", "actor_rollout_ref.hybrid_engine=false"],
    "separate_two_step_off": ["trainer.scheduler=two_step_off", "actor_rollout_ref.hybrid_engine=false"],
}
COLUMNS = (
    "gen", "update_actor", "get_teacher_knowledge", "wait_prev_teacher", "wait_prev_gen", "sync_rollout_weights",
)  # fmt: skip
PARTS = tuple(f"update_actor/{part}" for part in ("compute", "optimizer_step", "copies", "other"))
"""Printed of each schedule, and not in the table."""


def make_inputs(args: argparse.Namespace, folder: Path) -> list[str]:
    """Models, if the folder lacks them, and prompts; the overrides that name them."""
    tokenizer = full_tokenizer(args.student_shape)
    student, teacher = folder / f"student-{args.student_shape}", folder / f"teacher-{args.teacher_shape}"
    for seed, (path, shape) in enumerate([(student, args.student_shape), (teacher, args.teacher_shape)]):
        if not path.exists():
            make_model(path, shape, tokenizer, seed=seed)
    rng = np.random.default_rng(0)
    ends = rng.choice(len(tokenizer), len(tokenizer) // args.mean_length, replace=False)
    (student / "generation_config.json").write_text(json.dumps({"eos_token_id": ends.tolist()}), encoding="utf-8")
    most = max(total_steps(args, schedule) for schedule in args.schedules)
    letters = rng.choice(list("abcdefghijklmnopqrstuvwxyz "), (most * args.prompts, args.prompt_length))
    rows = "\n".join(json.dumps({"prompt": "".join(line)}) for line in letters)
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")
    return [
        f"actor_rollout_ref.model.path={student}", f"actor_rollout_ref.teacher.model.path={teacher}",
        f"data.train_files={folder / 'prompts.jsonl'}", f"trainer.default_local_dir={folder / 'runs'}",
    ]  # fmt: skip


def steps_left_out(args: argparse.Namespace, schedule: str) -> tuple[int, int]:
    """The first steps of a run, and those of its last that generate nothing any more."""
    return args.warmup, BATCHES_AHEAD[SCHEDULES[schedule][0].partition("=")[2]]


def total_steps(args: argparse.Namespace, schedule: str) -> int:
    """Return the number of steps of a run."""
    return int(args.steps + sum(steps_left_out(args, schedule)))


def configure(args: argparse.Namespace, schedule: str, inputs: list[str]) -> Config:
    """Return the configuration of one run."""
    separate = schedule.startswith("separate")
    gpus = [f"trainer.n_gpus_per_node={max(1, args.gpus // 2) if separate else args.gpus}"]
    gpus += [f"rollout.n_gpus_per_node={max(1, args.gpus - args.gpus // 2)}"] if separate else []
    return load_config(
        [
            *inputs, *SCHEDULES[schedule], *gpus, "trainer.logger=[jsonl]", "trainer.save_freq=0",
            f"trainer.total_training_steps={total_steps(args, schedule)}", f"trainer.device={args.device}",
            f"trainer.experiment_name={schedule}", f"data.train_batch_size={args.prompts}",
            f"data.max_prompt_length={args.prompt_length + 8}", f"data.max_response_length={args.response_length}",
            "actor_rollout_ref.actor.optim.lr=1e-12", f"distillation.topk={args.topk}", *args.overrides,
        ],
        config_name=args.config_name,
    )  # fmt: skip


def run(args: argparse.Namespace, schedules: list[str], inputs: list[str]) -> dict[str, dict[str, float]]:
    """The figures of schedules on the same pools, which start once."""
    configs = {schedule: configure(args, schedule, inputs) for schedule in schedules}
    first, found = next(iter(configs.values())), {}
    facts = check_all(first)
    plan = facts.plan
    with contextlib.ExitStack() as stack:
        loading = with_planned_caches(first, plan.memory, plan.gpu_bytes)
        (given,) = run_teachers(loading or first)
        teacher = stack.enter_context(make_teacher_process(given, plan, threads_per_process(first)))
        stack.enter_context(ray_cluster(first, args.device))
        if plan.memory.shares_gpu and loading is None:
            teacher.wait_ready()  # the rollout engine sizes its cache by what is free
        group = stack.enter_context(contextlib.closing(
            WorkerGroup(loading or first, device=args.device, num_updates=1, stop_token_ids=facts.stop_token_ids,
                        engine_memory=plan.memory.engine_memory)
        ))  # fmt: skip
        teacher.wait_ready()
        freeze_gc()  # as a run does
        for schedule, config in configs.items():
            train(args, dataclasses.replace(facts, config=config), group, teacher)
            found[schedule] = figures(config.run_dir, *steps_left_out(args, schedule))
            print(schedule, {name: round(value, 3) for name, value in found[schedule].items()}, flush=True)
    return found


def train(args: argparse.Namespace, facts: Facts, group: WorkerGroup, teacher: TeacherProcess) -> None:
    """One run."""
    config = facts.config
    facts.steps, place = total_steps_of(config, len(facts.train_prompts)), facts.plan.memory.teachers["teacher"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_run_folder(config))
        clock = stack.enter_context(trace_recording(config.run_dir))
        client = stack.enter_context(
            connect(facts, run_teachers(config)[0], [teacher.address], teacher.keys, replicas=place.replicas)
        )
        log = stack.enter_context(start_tracking(facts))
        GKDTrainer(
            config, teacher=client, check_teacher=teacher.check,
            shares_gpu=facts.plan.memory.shares_gpu, group=group, tokenizer=facts.tokenizer,
            train_prompts=facts.train_prompts, val_prompts=[], reward=None, tracking=log,
            store=CheckpointStore(config.run_dir, keep=1), clock=clock,
        ).fit()  # fmt: skip


def figures(run_folder: Path, first: int, last: int) -> dict[str, float]:
    """Medians over the counted steps: `step`, the timing metrics, `hidden_fraction` and lengths, in seconds, tokens."""
    rows = list(read_json_lines(run_folder / "metrics.jsonl"))
    counted = [row for row in rows if first < row["step"] <= len(rows) - last]
    published = sorted(  # before the first step and after each
        event["ts"] + event["dur"] for event in json.loads((run_folder / "trace.json").read_text(encoding="utf-8"))
        if event["ph"] == "X" and event["pid"] == 1 and event["name"] == "sync_rollout_weights"
    )
    assert len(published) == len(rows) + 1, (len(published), len(rows))
    found = {name: statistics.median(row.get(f"timing/{name}", 0.0) for row in counted) for name in COLUMNS + PARTS}
    hidden = [row["teacher/hidden_fraction"] for row in counted if "teacher/hidden_fraction" in row]
    return found | {
        "step": statistics.median((published[row["step"]] - published[row["step"] - 1]) / 1e6 for row in counted),
        "hidden_fraction": statistics.median(hidden) if hidden else float("nan"),
        "length": statistics.mean(row["response_length/mean"] for row in counted),
        "longest": max(row["response_length/max"] for row in counted),
    }


def ideal(schedule: str, own: dict[str, float], serial: dict[str, float] | None) -> float:
    """Seconds of a step, not a number without a serial run; see the top of this file."""
    if serial is None:
        return float("nan")
    gen, update, sync = (own[name] for name in ("gen", "update_actor", "sync_rollout_weights"))
    teacher = serial["get_teacher_knowledge"]
    if schedule == "serial":
        return gen + teacher + update + sync
    if schedule == "sync":
        return max(gen + update, teacher) + sync
    if schedule.startswith("separate"):
        return max(max(gen, update) + sync, teacher)
    return max(gen + update + sync, teacher)


def report(args: argparse.Namespace, found: dict[str, dict[str, float]]) -> str:
    """The figures as a Markdown table."""
    serial, some = found.get("serial"), next(iter(found.values()))
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU ({os.cpu_count()} cores)"
    lines = [
        f"{device}, student {args.student_shape} on {args.gpus}, teacher {args.teacher_shape}, {args.prompts} prompts "
        f"of {args.prompt_length} tokens, responses of {some['length']:.0f} in the mean and {some['longest']:.0f} "
        f"at most, {args.steps} steps; seconds",
        "",
        f"| | step | {' | '.join(COLUMNS)} | hidden_fraction | ideal | efficiency |",
        "|---" * (len(COLUMNS) + 5) + "|",
    ]
    for schedule, own in found.items():
        best = ideal(schedule, own, serial)
        cells = [own["step"], *(own[name] for name in COLUMNS), own["hidden_fraction"], best, best / own["step"]]
        lines.append(f"| {schedule} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="configuration keys, dotted.key=value")
    parser.add_argument("--shape", choices=SHAPES, help="of both models")
    parser.add_argument("--student-shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--teacher-shape", choices=SHAPES, default="7b")
    parser.add_argument("--config-name", choices=["gkd", "one_gpu"], default="gkd", help="in config/ (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs, or processes, of the student (%(default)s)")
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="the ideal needs serial"
    )
    parser.add_argument("--prompts", type=int, default=128, help="of a step (%(default)s)")
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--response-length", type=int, default=2048, help="at most (%(default)s)")
    parser.add_argument("--mean-length", type=int, default=512, help="of the responses, about (%(default)s)")
    parser.add_argument("--topk", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="counted steps (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each run that are not counted (%(default)s)")
    args = parser.parse_intermixed_args()
    args.student_shape, args.teacher_shape = args.shape or args.student_shape, args.shape or args.teacher_shape
    wanted = [name for name in SCHEDULES if name in args.schedules]
    if args.device == "cuda" and args.gpus < 2 and any(name.startswith("separate") for name in wanted):
        print("separate pools are left out: they need --gpus 2 or more")
        wanted = [name for name in wanted if not name.startswith("separate")]
    if not wanted:
        parser.error("--schedules: nothing is left to run")
    with tempfile.TemporaryDirectory() as name:
        inputs = make_inputs(args, Path(name))
        found = {}
        for separate in (False, True):
            if together := [name for name in wanted if name.startswith("separate") == separate]:
                found |= run(args, together, inputs)
        print(report(args, found))


if __name__ == "__main__":
    main()

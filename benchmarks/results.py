"""What distillation is worth on the task of gpu_demo: one list of runs, their curves, and docs/results.md from these.

    python benchmarks/results.py run --minutes 25     # the runs that are missing, as many as fit; a GPU, else small
    python benchmarks/results.py list                 # what is stored and what is missing
    python benchmarks/results.py report               # docs/results.md and its pictures, from the stored runs alone

`run` makes the models first where they are not there yet. Each finished run is a small CSV in benchmarks/results, with
the models, the device and the command at its head; one that has not ended when the minutes are over is stored as far
as it came, and made anew the next time. What a run says is a log beside it, which goes when it is stored. All runs
of a folder must have the same models, which another type of GPU or other libraries do not make: then take the models
along (--models FOLDER).

Every run begins at the same student and trains at a constant rate, so that each point of its curve is a run that ends
there. All train for the same minutes, TRL's for three times as many; those of the program and TRL's for the recipe's
steps at most. `--together 4` makes four runs at a time on each GPU; they have to share its memory, and slow each other
down alike:

    python benchmarks/results.py run --together 4 actor_rollout_ref.rollout.gpu_memory_utilization=0.1 \\
        actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=4000000000 \\
        actor_rollout_ref.teacher.backend=hf

Minutes are those of training steps: generation, scoring, update, publish; not loading, validation and saving. Those of
training on the teacher's answers begin with the time that the teacher takes to write them.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, device_name, tail
from results_report import COLUMNS, Stored, is_validation, read, read_all, report

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo.folders import DemoPaths
from hybrid_gkd.demo.gpu_demo import build_gpu_demo
from hybrid_gkd.demo.use import visible_device
from hybrid_gkd.errors import HybridGKDError
from hybrid_gkd.teacher.server.supervisor import visible_gpus

STORED = ROOT / "benchmarks" / "results"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GROUPS = f"data.train_batch_size=${{by_device:32,4}} {ROLLOUT}.n=8"  # as many answers as the recipe, eight to a prompt
CONSTANT = f"{ACTOR}.optim.lr_scheduler_type=constant {ACTOR}.optim.lr=3e-4"  # at the recipe's 5e-4 they jump more
ONE_STEP = f"{ACTOR}.ppo_mini_batch_size=null {ACTOR}.optim.betas=[0.9,0.95] {ACTOR}.optim.lr_warmup_steps=20"
"""The stored runs take one optimizer step per rollout, unlike the recipe."""
PPO = f"distillation.enabled=false {GROUPS} {ACTOR}.optim.lr=3e-5"
AHEAD, FURTHER = "trainer.scheduler=one_step_off", "trainer.scheduler=two_step_off"
WEIGHTED = "algorithm.rollout_is_threshold=2"
SEEDS = ("data.seed", f"{ROLLOUT}.seed", "trainer.seed")
LOOK_EVERY = 1.0
"""Seconds."""
STOPPED = "stopped after"
"""At the head of a run that did not come to its end: it is made anew."""
VALIDATIONS = 8
"""Of a run that comes to its last step; each takes seconds that train nothing."""
MOST_ROWS = 60
"""Of a stored run, validations aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a student is trained."""

    title: str
    how: str
    """"program", "sft" on the answers of the data or of the teacher, or "trl"."""
    overrides: str = ""
    """Of config/gpu_demo.yaml; of an "sft" run, whose answers."""
    seeds: int = 1
    times: float = 1.0
    """As long as the others, so many times."""


RUNS = {
    "sft_data": Run(title="SFT on the data's solutions", how="sft", overrides="data", seeds=3),
    "sft_teacher": Run(title="SFT on the teacher's answers", how="sft", overrides="teacher", seeds=3),
    "grpo": Run(title="GRPO", how="program", overrides=PPO, seeds=3),
    "opd": Run(title="on-policy distillation", how="program", seeds=3),
    "opd_rewards": Run(
        title="distillation with rewards", how="program", seeds=3,
        overrides=f"distillation.use_task_rewards=true {GROUPS} distillation.distillation_loss_coef=10",
    ),
    "ppo_gae": Run(
        title="PPO with GAE", how="program", overrides=f"{PPO} algorithm.adv_estimator=gae critic.optim.lr=2e-4"
    ),
    "opd_reverse": Run(title="reverse KL", how="program", overrides="distillation.loss_mode=reverse_kl"),
    "opd_jsd": Run(title="JSD", how="program", overrides="distillation.loss_mode=jsd"),
    "opd_k1": Run(title="K = 1", how="program", overrides="distillation.topk=1"),
    "opd_k8": Run(title="K = 8", how="program", overrides="distillation.topk=8"),
    "opd_stale1": Run(title="one batch ahead", how="program", overrides=AHEAD),
    "opd_stale2": Run(title="two batches ahead", how="program", overrides=FURTHER),
    "opd_stale1_is": Run(title="one ahead, importance weights", how="program", overrides=f"{AHEAD} {WEIGHTED}"),
    "opd_stale2_is": Run(title="two ahead, importance weights", how="program", overrides=f"{FURTHER} {WEIGHTED}"),
    "opd_bf16": Run(title="bf16 master weights", how="program", overrides=f"{ACTOR}.fsdp_config.model_dtype=bf16"),
    "trl": Run(title="TRL, transformers generation", how="trl", times=3.0),
}  # fmt: skip
"""`opd` is also the row of forward KL, K = 64, no staleness and fp32 master weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all runs share."""

    paths: DemoPaths
    device: str
    steps: int
    minutes: float
    """Of training at most, a run's `times` aside; supervised runs train as long. Then a run is ended and stored."""
    results: Path
    overrides: tuple[str, ...] = ()
    """Of the recipe, for every run."""
    together: int = 1
    """Runs at the same time on each visible GPU, or without one."""

    @property
    def places(self) -> int:
        """Runs at the same time."""
        return self.together * max(1, len(visible_gpus()))


def models_key(paths: DemoPaths) -> str:
    """Of the weights that all runs begin at and learn from."""
    digest = hashlib.sha256()
    for folder in (paths.teacher, paths.student):
        digest.update((folder / "model.safetensors").read_bytes())
    return digest.hexdigest()[:12]


def in_words(paths: DemoPaths) -> dict[str, str]:
    """Teacher and student, their sizes and how much they answer right where it was counted, for the head of a run."""
    manifest, found = json.loads(paths.manifest.read_text(encoding="utf-8")), {}
    for name in ("teacher", "student"):
        accuracy = manifest[name].get("held_out_accuracy")
        right = "" if accuracy is None else f", {100 * accuracy:.1f} % right"
        found[name] = f"{manifest[name]['parameters'] / 1e6:.3g}M parameters{right}"
    return found


def obstacle(run: Run, settings: Settings) -> str | None:
    """Why a run cannot be started here, or None."""
    if run.how == "trl" and importlib.util.find_spec("trl") is None:
        return "needs TRL, which is not installed (pip install trl)"
    if run.how == "program":
        try:
            load_config(program_overrides(run, 0, settings, Path("unused")), config_name="gpu_demo")
        except HybridGKDError as error:
            return f"this version does not take its configuration: {error}"
    return None


def own_overrides(run: Run) -> str:
    """What a run differs in from the recipe and from other runs, at the head of its file."""
    return f"{CONSTANT} {run.overrides}".rstrip()


def program_overrides(run: Run, seed: int, settings: Settings, folder: Path) -> list[str]:
    """Of config/gpu_demo.yaml, for a run of the program itself."""
    paths = settings.paths
    return [
        f"data.train_files={paths.train}", f"data.val_files={paths.val}", f"trainer.device={settings.device}",
        f"actor_rollout_ref.model.path={paths.student}", f"actor_rollout_ref.teacher.model.path={paths.teacher}",
        *CONSTANT.split(), *ONE_STEP.split(), f"trainer.total_training_steps={settings.steps}",
        f"trainer.test_freq={max(1, settings.steps // VALIDATIONS)}", "trainer.save_freq=0", "trainer.logger=[]",
        "trainer.experiment_name=run", f"trainer.default_local_dir={folder}", *(f"{key}={seed}" for key in SEEDS),
        *run.overrides.split(), *settings.overrides,
    ]  # fmt: skip


def run_command(name: str, seed: int, settings: Settings, folder: Path) -> list[str]:
    """What trains one run, in a process of its own, with which the card is free again."""
    run = RUNS[name]
    if run.how == "program":
        overrides = program_overrides(run, seed, settings, folder)
        return [sys.executable, "-m", "hybrid_gkd", "--config-name", "gpu_demo", *overrides]
    script, own = {
        "sft": ("results_sft.py", ["--answers", run.overrides, "--minutes", str(settings.minutes)]),
        "trl": ("results_trl.py", []),
    }[run.how]
    return [
        sys.executable, str(Path(__file__).with_name(script)), *CONSTANT.split(), *ONE_STEP.split(),
        *settings.overrides, *own, "--models", str(settings.paths.root), "--steps", str(settings.steps),
        "--seed", str(seed), "--device", settings.device, "--out", str(folder),
    ]  # fmt: skip


def train(name: str, seed: int, settings: Settings, place: int, deadline: float, over: threading.Event) -> bool:
    """Train and store one run, the `place`-th of those at the same time; False if it is not at its end at the deadline.

    Then it is stored as far as it came, if it was validated since its beginning and came further than what is stored.
    Raises CalledProcessError if it failed, with the end of its log.
    """
    file = settings.results / f"{name}-{seed}.csv"
    head = {  # before the training, which would be lost with an error here
        "run": name, "seed": seed, "models": models_key(settings.paths), "device": device_name(settings.device),
        "code": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "overrides": " ".join([own_overrides(RUNS[name]), *settings.overrides]), "together": settings.together,
        **in_words(settings.paths),
    }  # fmt: skip
    answers, log = answers_per_step(name, settings), file.with_suffix(".log")
    minutes = settings.minutes * RUNS[name].times
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if gpus := visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    # A process that ended with the run may write into it for another moment.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder, rows, stopped = Path(temporary), list[dict[str, float]](), False
        command = run_command(name, seed, settings, folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            while process.poll() is None and minutes_of(rows) < minutes and not stopped:
                stopped = over.wait(LOOK_EVERY) or time.monotonic() > deadline
                said, rows = len(rows), curve_so_far(folder, answers)
                say_validations(f"{name} {seed}", rows[said:])
            code = process.poll()
            stopped = stopped and code is None and minutes_of(rows) < minutes
        finally:
            stop(process)
        if code:
            raise subprocess.CalledProcessError(code, command, tail(log))
        rows = curve_so_far(folder, answers)
    before = minutes_of(read(file).rows) if file.exists() else 0.0  # of a run that was stopped earlier
    if not stopped or (any(is_validation(row) and row["step"] > 0 for row in rows) and minutes_of(rows) > before):
        store(file, head | ({STOPPED: f"{minutes_of(rows):.2f} minutes"} if stopped else {}), thinned(rows))
        log.unlink()
    return not stopped


def say_validations(name: str, rows: list[dict[str, float]]) -> None:
    """A line for every validation of these rows."""
    for row in filter(is_validation, rows):
        found = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if key.startswith("val/"))
        print(f"{name}: step {row['step']:g}, {row['minutes']:.2f} minutes of training: {found}", flush=True)


def curve_so_far(folder: Path, answers: int) -> list[dict[str, float]]:
    """`curve` of what a run has written below its folder."""
    found = list(folder.rglob("metrics.jsonl"))
    lines = found[0].read_text(encoding="utf-8").split("\n")[:-1] if found else []  # the last one may be half written
    return curve([json.loads(line) for line in lines], answers)


def minutes_of(rows: list[dict[str, float]]) -> float:
    """Of training."""
    return rows[-1]["minutes"] if rows else 0.0


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that may still run, as its user would: a signal, and a second one that does not wait."""
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
    with contextlib.suppress(ProcessLookupError):  # also what it has started and left behind: a pool's process
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers_per_step(name: str, settings: Settings) -> int:
    """Answers that a step of the program trains on; 0 for a run of another, which counts its tokens itself."""
    if RUNS[name].how != "program":
        return 0
    config = load_config(program_overrides(RUNS[name], 0, settings, Path("unused")), config_name="gpu_demo")
    return config.data.train_batch_size * config.actor_rollout_ref.rollout.n


def curve(metrics: list[dict[str, float]], answers: int) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl with minutes of training and answer tokens trained on so far."""
    rows, minutes, tokens = [], 0.0, 0.0
    for row in metrics:
        if answers and row["step"] > 0:
            minutes += row["timing/step"] / 60
            tokens += row["response_length/mean"] * answers
        mine = {"minutes": minutes, "answer_tokens": tokens} if answers else {}
        rows.append({key: value for key, value in (row | mine).items() if key in COLUMNS})
    return rows


def thinned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """All validations, and every so many of the other rows."""
    every = max(1, len(rows) // MOST_ROWS)
    return [row for i, row in enumerate(rows) if is_validation(row) or i % every == 0]


def store(file: Path, head: dict[str, Any], rows: list[dict[str, float]]) -> None:
    """Write a CSV behind lines `# key: value`, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    with open(unfinished, "w", newline="", encoding="utf-8") as out:
        out.writelines(f"# {key}: {value}\n" for key, value in head.items())
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.6g}" for key, value in row.items()} for row in rows)
    unfinished.rename(file)


def commit() -> str:
    """The version of the code, where git knows it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:  # a machine without git
        return "unknown"
    return done.stdout.strip() or "unknown"


def wanted(only: list[str], seeds: list[int] | None) -> list[tuple[str, int]]:
    """Runs in the order in which they are made: the longest first, since the others are made beside it.

    Then those of several seeds before those of one, and a seed before the next, so that each part is a comparison.
    """
    found = [(name, seed) for name in only for seed in (range(RUNS[name].seeds) if seeds is None else seeds)]
    order = {name: (-run.times, run.seeds == 1, index) for index, (name, run) in enumerate(RUNS.items())}
    return sorted(found, key=lambda item: (*order[item[0]][:2], item[1], order[item[0]]))


def run_all(args: argparse.Namespace) -> None:
    """Train what is missing, as much as the minutes hold."""
    deadline = time.monotonic() + 60 * args.minutes
    device = args.device or visible_device()
    paths = DemoPaths.under(args.models.absolute()) if args.models else build_gpu_demo(device)
    steps = args.steps or load_config([f"trainer.device={device}"], config_name="gpu_demo").trainer.total_training_steps
    settings = Settings(
        paths=paths, device=device, steps=steps, minutes=args.minutes_each, results=args.results.absolute(),
        overrides=tuple(args.overrides), together=args.together,
    )  # fmt: skip
    train_missing(wanted(args.only, args.seeds), settings, stored_runs(settings), deadline)


def stored_runs(settings: Settings) -> set[tuple[str, int]]:
    """Names and seeds of what is there. Raises SystemExit: runs of other models."""
    found, models = read_all(settings.results), models_key(settings.paths)
    if other := sorted({str(each.head["models"]) for each in found} - {models}):
        raise SystemExit(
            f"{settings.results} holds runs of other models ({', '.join(other)}, here {models}), which cannot be "
            "compared: --models takes the folder of theirs, --results another folder for these"
        )
    return whole(found)


def whole(found: list[Stored]) -> set[tuple[str, int]]:
    """Names and seeds of the runs that came to their end, with the overrides that they would have now."""
    ended = [each for each in found if STOPPED not in each.head and each.name in RUNS]
    now = {name: own_overrides(run) for name, run in RUNS.items()}
    return {(each.name, each.seed) for each in ended if each.head["overrides"].startswith(now[each.name])}


def train_missing(
    runs: list[tuple[str, int]], settings: Settings, there: set[tuple[str, int]], deadline: float
) -> None:
    """Run after run, until they are all there or the time is over; one that fails does not keep the others.

    Beside others it may have found too little memory: it has a second turn when all have had one. Raises SystemExit
    with the names of those that failed then.
    """
    missing = []
    for name, seed in runs:
        if (name, seed) in there:
            continue
        if reason := obstacle(RUNS[name], settings):
            print(f"{name}: skipped: {reason}", flush=True)
        else:
            missing.append((name, seed))
    failed = train_at_once(missing, settings, deadline)
    if failed and settings.together > 1:
        failed = train_at_once(failed, settings, deadline)
    if failed:
        raise SystemExit(f"failed: {', '.join(f'{name} {seed}' for name, seed in failed)}")


def train_at_once(runs: list[tuple[str, int]], settings: Settings, deadline: float) -> list[tuple[str, int]]:
    """Train as many at a time as there are places; those that failed."""
    waiting, over = iter(runs), threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinds, which ends the runs
    with ThreadPoolExecutor(settings.places) as pool:
        try:
            turns = range(settings.places)
            found = pool.map(lambda place: train_in_turn(waiting, settings, place, deadline, over), turns)
            return [run for each in found for run in each]
        except BaseException:
            over.set()  # the pool waits for its threads, which end their runs
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def train_in_turn(
    waiting: Iterator[tuple[str, int]], settings: Settings, place: int, deadline: float, over: threading.Event
) -> list[tuple[str, int]]:
    """Train what is waiting, one after another; those that failed."""
    longest, failed = 0.0, list[tuple[str, int]]()
    for name, seed in waiting:
        began = time.monotonic()
        if began + longest > deadline:
            print(f"{name} {seed}: not begun, the longest run so far took {longest / 60:.1f} minutes", flush=True)
            break
        print(f"{name} {seed}: {(deadline - began) / 60:.1f} minutes are left", flush=True)
        try:
            if not train(name, seed, settings, place, deadline, over):
                print(f"{name} {seed}: stopped before its end; it is made anew the next time", flush=True)
                break
        except subprocess.CalledProcessError as error:
            print(f"{name} {seed}: failed with exit code {error.returncode}: {error.output}", flush=True)
            failed.append((name, seed))
        longest = max(longest, time.monotonic() - began)
    return failed


def list_all(args: argparse.Namespace) -> None:
    """Print the state of every run."""
    there = whole(read_all(args.results))
    for name, run in RUNS.items():
        stored = [seed for seed in range(run.seeds) if (name, seed) in there]
        print(f"{name:16} {len(stored)} of {run.seeds} stored; {run.title}")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "list", "report"))
    parser.add_argument("overrides", nargs="*", help="run: configuration keys for every run, dotted.key=value")
    parser.add_argument("--results", type=Path, default=STORED, help="folder of the stored runs (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="run: then end, also what is under way")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="run: these; keys come before")
    parser.add_argument("--seeds", nargs="+", type=int, help="run: these (default: as many as the list has)")
    parser.add_argument("--models", type=Path, help="run: a folder that python -m hybrid_gkd.demo gpu_demo has made")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="run: default is what there is")
    parser.add_argument("--steps", type=int, help="run: of the program (default: the recipe's)")
    parser.add_argument("--minutes-each", type=float, default=4.0, help="run: training time of a run at most")
    parser.add_argument("--together", type=int, default=1, help="run: so many at a time on each visible GPU")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="report: where it is written (%(default)s)")
    args = parser.parse_intermixed_args()
    if args.what == "report":
        titles = {name: run.title for name, run in RUNS.items()}
        report(read_all(args.results), titles, args.docs, args.results / "conclusions.md")
    else:
        {"run": run_all, "list": list_all}[args.what](args)


if __name__ == "__main__":
    main()

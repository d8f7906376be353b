"""Compare ways to train a student on the task of gpu_demo, and write docs/results.md from the stored runs.

    python benchmarks/results.py run --minutes 25     # the missing runs, as many as fit; on a GPU, else small
    python benchmarks/results.py search --minutes 25  # rates and numbers of optimizer steps, a third as long
    python benchmarks/results.py list                 # the stored and the missing runs
    python benchmarks/results.py report               # docs/results.md and its pictures, from the stored runs alone

A run is a method in a regime: many prompts, 512 prompts, or a warm start by SFT. `search` trains every method of a
regime with each of its settings, one seed; `run` takes the best stored setting and three seeds. All rates fall to 0 by
a cosine, so that only the end of a run is a result. Supervised runs read the data's solutions or the teacher's
completions, which are written once (`python -m hybrid_gkd.teacher generate`).

Models are made first where they are missing. A finished run is a small CSV in benchmarks/results with the models, the
device and the settings at its head; the log of a failed run stays beside it. All runs of a folder must have the same
models, which another type of GPU or other libraries do not make: then use the folder again (--models FOLDER).

`--together 8` trains eight runs at a time on each GPU; they share its memory, and slow each other down alike:

    python benchmarks/results.py run --together 8 actor_rollout_ref.rollout.gpu_memory_utilization=0.05 \\
        actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=2000000000 \\
        actor_rollout_ref.teacher.backend=hf

Minutes are those of training steps: generation, scoring, update, publish; not loading, validation and saving. Runs on
the teacher's completions also count the time that the teacher took for those they use.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import itertools
import json
import os
import shutil
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
from results_methods import ACTOR, ON_DEMO, REGIMES, RUNS, TOP_K, VALIDATIONS, Method, Regime, Setting
from results_report import COLUMNS, is_validation, read, read_all, report

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.demo.folders import DemoPaths, Row, write_rows
from hybrid_gkd.demo.gpu_demo import build_gpu_demo
from hybrid_gkd.demo.use import visible_device
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.teacher.server.supervisor import visible_gpus

STORED = ROOT / "benchmarks" / "results"
WARM_UP = f"{ACTOR}.optim.lr_warmup_steps=0 {ACTOR}.optim.lr_warmup_steps_ratio=0.1"
"""A fraction of the optimizer steps, since methods take different numbers of them."""
STEPS = {"cuda": 110, "cpu": 20}
"""Training steps of a run, each of a rollout batch: 5.1M tokens of completions on a GPU."""
BATCH = {"cuda": 256, "cpu": 32}
"""Prompts of a rollout, as in the recipe."""
LOOK_EVERY = 1.0
"""Seconds between two looks at a run's metrics."""
MOST_ROWS = 60
"""Rows of a stored run, validations aside."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training: a method in a regime, with a setting and a seed."""

    name: str
    setting: Setting
    seed: int = 0
    searched: bool = False
    """Whether it is one of the search."""

    @property
    def regime(self) -> Regime:
        return RUNS[self.name][0]

    @property
    def method(self) -> Method:
        return RUNS[self.name][1]

    @property
    def fraction(self) -> float:
        """Its length as a fraction of a run that is not one of the search."""
        return self.method.search_fraction if self.searched else 1.0

    def __str__(self) -> str:
        return f"{self.name} ({self.setting})" if self.searched else f"{self.name} {self.seed}"

    def file(self, results: Path) -> Path:
        """The stored run."""
        if self.searched:
            return results / "search" / f"{self.name}-{self.setting.slug}.csv"
        return results / f"{self.name}-{self.seed}.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all runs."""

    paths: DemoPaths
    device: str
    steps: int
    """Training steps of a run of length 1."""
    results: Path
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe for every run."""
    together: int = 1
    """Runs at the same time on each visible GPU, or without one."""

    @property
    def places(self) -> int:
        """Runs at the same time."""
        return self.together * max(1, len(visible_gpus()))

    def prompts(self, run: Run) -> Path:
        """The training file of a run."""
        number = run.regime.prompts or "all"
        return self.paths.root / "results" / f"{run.method.given or 'prompts'}-{number}.jsonl"

    def student_of(self, run: Run) -> Path:
        """The student at the end of a run."""
        return self.paths.root / "results" / f"{run.name}-{run.seed}"

    @property
    def written(self) -> Path:
        """The teacher's completions of all prompts that a run uses, and beside it the seconds that each took."""
        return self.paths.root / "results" / "written.jsonl"


def models_key(paths: DemoPaths) -> str:
    """Return a hash of the teacher's and the first student's weights."""
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
    if run.method.how == "trl" and importlib.util.find_spec("trl") is None:
        return "needs TRL, which is not installed (pip install trl)"
    return None


def overrides_of(run: Run, settings: Settings) -> list[str]:
    """Return the overrides that distinguish a run, for the head of its file."""
    own = f"{run.regime.overrides} {run.method.overrides}".split()
    return [*own, *run.setting.overrides(round(run.fraction * settings.steps), settings.device), *settings.overrides]


def program_overrides(run: Run, settings: Settings, folder: Path) -> list[str]:
    """Return all overrides of config/gpu_demo.yaml for a run of the program."""
    paths, own = settings.paths, overrides_of(run, settings)
    steps = max(1, round(run.setting.length * settings.steps * run.fraction))
    return [
        f"data.train_files={settings.prompts(run)}", f"data.val_files={paths.val}",
        f"trainer.device={settings.device}", f"actor_rollout_ref.model.path={paths.student}",
        f"actor_rollout_ref.teacher.model.path={paths.teacher}", f"trainer.test_freq={max(1, steps // VALIDATIONS)}",
        f"trainer.save_freq={-1 if run.regime.kept else 0}", "trainer.logger=[]", "trainer.experiment_name=run",
        f"trainer.default_local_dir={folder}", f"distillation.topk={TOP_K}", *WARM_UP.split(),
        f"trainer.seed={run.seed}", *own,
    ]  # fmt: skip


def run_command(run: Run, settings: Settings, folder: Path) -> list[str]:
    """Command of a run, which has a process of its own, with which the card is free again."""
    if run.method.how == "program":
        overrides = program_overrides(run, settings, folder)
        return [sys.executable, "-m", "hybrid_gkd", "--config-name", "gpu_demo", *overrides]
    return [
        sys.executable, str(Path(__file__).with_name("results_trl.py")), *overrides_of(run, settings), "--models",
        str(settings.paths.root), "--train", str(settings.prompts(run)), "--seed", str(run.seed), "--device",
        settings.device, "--out", str(folder), "--set", run.method.trl,
    ]  # fmt: skip


def train(run: Run, settings: Settings, place: int, deadline: float, over: threading.Event) -> bool:
    """Train and store one run, the `place`-th of those at the same time; False if the deadline ended it.

    Raises CalledProcessError if it failed, with the end of its log.
    """
    file = run.file(settings.results)
    head = {  # before the training, which would be lost with an error here
        "run": run.name, "seed": run.seed, "models": models_key(settings.paths),
        "device": device_name(settings.device), "code": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "setting": run.setting, "overrides": " ".join(overrides_of(run, settings)), "together": settings.together,
        **in_words(settings.paths),
    }  # fmt: skip
    batch, written, log = batch_of(run, settings), seconds_written(run, settings), file.with_suffix(".log")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if settings.together > 1:  # else every process has a thread for each core, more than a host may allow
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.places)))
    if gpus := visible_gpus():
        environment["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    # A process that ended with the run may write into it for another moment.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder, rows, stopped = Path(temporary), list[dict[str, float]](), False
        command = run_command(run, settings, folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            while process.poll() is None and not stopped:
                stopped = over.wait(LOOK_EVERY) or time.monotonic() > deadline
                said, rows = len(rows), curve_so_far(folder, batch, written)
                say_validations(str(run), rows[said:])
            code = process.poll()
        finally:
            stop(process)
        if code is None:
            return False
        if code:
            raise subprocess.CalledProcessError(code, command, tail(log))
        if run.regime.kept and not run.searched:
            (exported,) = folder.rglob("huggingface")
            shutil.rmtree(settings.student_of(run), ignore_errors=True)  # of another setting: `move` would go into it
            shutil.move(exported, settings.student_of(run))
        store(file, head, thinned(curve_so_far(folder, batch, written)))
    log.unlink()
    return True


def say_validations(name: str, rows: list[dict[str, float]]) -> None:
    """A line for every validation of these rows."""
    for row in filter(is_validation, rows):
        found = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if key.startswith("val/"))
        print(f"{name}: step {row['step']:g}, {row['minutes']:.2f} minutes of training: {found}", flush=True)


def curve_so_far(folder: Path, batch: tuple[int, int], written: tuple[float, int]) -> list[dict[str, float]]:
    """`curve` of what a run has written below its folder."""
    found = list(folder.rglob("metrics.jsonl"))
    return curve(list(read_json_lines(found[0])) if found else [], batch, written)  # the last line may be half written


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


def batch_of(run: Run, settings: Settings) -> tuple[int, int]:
    """Prompts of the program's step, and completions drawn for each; zeros for TRL, which counts its tokens itself."""
    if run.method.how != "program":
        return 0, 0
    config = load_config(program_overrides(run, settings, Path("unused")), config_name="gpu_demo")
    return config.data.train_batch_size, config.actor_rollout_ref.rollout.n


def seconds_written(run: Run, settings: Settings) -> tuple[float, int]:
    """Seconds that the teacher took for each completion of a run's rows, and their number; zeros without them."""
    if run.method.given != "teacher":
        return 0.0, 0
    with open(settings.prompts(run), encoding="utf-8") as file:
        rows = sum(1 for _ in file)
    return float(settings.written.with_suffix(".seconds").read_text(encoding="utf-8")), rows


def curve(
    metrics: list[dict[str, float]], batch: tuple[int, int], written: tuple[float, int]
) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl with minutes of training and tokens of completions trained on so far.

    A prompt has one given completion, or all that are drawn for it. A completion of the teacher is paid for when it is
    first used.
    """
    rows, minutes, tokens = [], 0.0, 0.0
    (prompts, drawn), (each, left) = batch, written
    for row in metrics:
        if prompts and row["step"] > 0:
            given = round(prompts * row.get("training/given_fraction", 0.0))
            used = min(left, given)
            minutes, left = minutes + (row["timing/step"] + each * used) / 60, left - used
            tokens += row["response_length/mean"] * (given + drawn * (prompts - given))
        mine = {"minutes": minutes, "answer_tokens": tokens} if prompts else {}
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


def wanted(what: str, only: list[str], seeds: list[int], results: Path) -> list[Run]:
    """The runs of a search, or each method's best setting with every seed; a seed before the next."""
    if what == "search":
        return [Run(name, setting, searched=True) for name in only for setting in RUNS[name][1].settings]
    best = {name: chosen(name, results) for name in only}
    return [Run(name, best[name], seed) for seed in seeds for name in only]


def chosen(name: str, results: Path) -> Setting:
    """The setting that was best in the stored search, or the first where none is stored."""
    settings = RUNS[name][1].settings
    ends = {
        setting: read(file).quality
        for setting in settings if (file := Run(name, setting, searched=True).file(results)).exists()
    }  # fmt: skip
    return max(ends, key=lambda setting: ends[setting]) if ends else settings[0]


def run_all(args: argparse.Namespace) -> None:
    """Train the missing runs, as many as the minutes hold."""
    deadline = time.monotonic() + 60 * args.minutes
    device = args.device or visible_device()
    paths = DemoPaths.under(args.models.absolute()) if args.models else build_gpu_demo(device)
    settings = Settings(
        paths=paths, device=device, steps=args.steps or STEPS[device], results=args.results.absolute(),
        overrides=tuple(args.overrides), together=args.together,
    )  # fmt: skip
    check_models(settings)
    runs = wanted(args.what, args.only, args.seeds, settings.results)
    missing = [run for run in runs if not is_stored(run, settings)]
    write_prompts(missing, settings)
    train_missing(missing, settings, deadline)


def check_models(settings: Settings) -> None:
    """Raises SystemExit: the folder holds runs of other models."""
    models = models_key(settings.paths)
    found = [*read_all(settings.results), *read_all(settings.results / "search")]
    if other := sorted({str(each.head["models"]) for each in found} - {models}):
        raise SystemExit(
            f"{settings.results} holds runs of other models ({', '.join(other)}, here {models}), which cannot be "
            "compared: --models takes the folder of theirs, --results another folder for these"
        )


def is_stored(run: Run, settings: Settings) -> bool:
    """Whether a run is there with the overrides that it would have now."""
    file = run.file(settings.results)
    return file.exists() and read(file).head["overrides"] == " ".join(overrides_of(run, settings))


def write_prompts(runs: list[Run], settings: Settings) -> None:
    """Write the training files of these runs, with the teacher's completions first.

    Files that are there may be shorter: of other --steps, or of a command that was killed.
    """
    rows = list(itertools.islice(read_json_lines(settings.paths.train), settings.steps * BATCH[settings.device]))
    written: list[dict[str, Any]] = []
    if given := next((run for run in runs if run.method.given == "teacher"), None):
        written = write_completions(rows, given, settings)
    for file, run in {settings.prompts(run): run for run in runs}.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        own = written if run.method.given == "teacher" else rows
        if run.method.given == "data":
            own = [row | {"given": row["answer"]} for row in rows]
        unfinished = file.with_suffix(f".{os.getpid()}")  # runs of another process may read the same file
        write_rows(unfinished, own[: run.regime.prompts])
        unfinished.rename(file)


def write_completions(rows: list[Row], run: Run, settings: Settings) -> list[dict[str, Any]]:
    """The rows with the teacher's completions, cut ones left out, which are drawn once; stores the seconds of each.

    All runs with the same models have the length limit of this one.
    """
    prompts, out = settings.written.with_suffix(".prompts.jsonl"), settings.written
    seconds = out.with_suffix(".seconds")
    if not seconds.exists() or sum(1 for _ in read_json_lines(prompts)) != len(rows):
        seconds.unlink(missing_ok=True)
        for begun in out.parent.glob(f"{out.name}*"):  # its time is unknown, and the rest of it alone would be measured
            begun.unlink()
        out.parent.mkdir(parents=True, exist_ok=True)
        write_rows(prompts, rows)
        config = load_config(program_overrides(run, settings, Path("unused")), config_name="gpu_demo")
        command = [
            sys.executable, "-m", "hybrid_gkd.teacher", "generate", str(prompts), "--ckpt-path",
            str(settings.paths.teacher), "--out", str(out), "--response-key", "given", "--device", settings.device,
            "--max-tokens", str(config.data.max_response_length),
        ]  # fmt: skip
        if run.regime.kept:  # a third of what a pretrained model writes is longer, and to be learned as well
            command.append("--keep-cut")
        if (fraction := config.actor_rollout_ref.rollout.gpu_memory_utilization) is not None:
            command += ["--gpu-memory-utilization", str(fraction)]  # others may share the GPU
        began = None
        with ended_by_sigterm():
            process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
            try:
                while process.poll() is None:  # the first completion ends what is loading
                    if began is None and out.exists() and out.stat().st_size:
                        began = time.monotonic()
                    time.sleep(0.1)
            finally:
                stop(process)  # or it would share the GPU with what is measured next
        if process.returncode or began is None:
            raise SystemExit(f"the teacher's completions: exit code {process.returncode}")
        seconds.write_text(f"{(time.monotonic() - began) / len(rows):.6f}\n", encoding="utf-8")
    return list(read_json_lines(out))


def train_missing(runs: list[Run], settings: Settings, deadline: float) -> None:
    """Train run after run, until all are stored or the time is over; a failure does not keep the others.

    Beside others it may have found too little memory: it has a second turn when all have had one. Raises SystemExit
    with the names of those that failed then.
    """
    able = []
    for run in runs:
        if reason := obstacle(run, settings):
            print(f"{run}: skipped: {reason}", flush=True)
        else:
            able.append(run)
    failed = train_at_once(able, settings, deadline)
    if failed and settings.together > 1:
        failed = train_at_once(failed, settings, deadline)
    if failed:
        raise SystemExit(f"failed: {', '.join(map(str, failed))}")


def train_at_once(runs: list[Run], settings: Settings, deadline: float) -> list[Run]:
    """Train as many at a time as there are places; those that failed."""
    waiting, over = iter(runs), threading.Event()
    with ThreadPoolExecutor(settings.places) as pool, ended_by_sigterm():
        try:
            turns = range(settings.places)
            found = pool.map(lambda place: train_in_turn(waiting, settings, place, deadline, over), turns)
            return [run for each in found for run in each]
        except BaseException:
            over.set()  # the pool waits for its threads, which end their runs
            raise


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Unwind the block at SIGTERM, which ends the processes that it has started."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def train_in_turn(
    waiting: Iterator[Run], settings: Settings, place: int, deadline: float, over: threading.Event
) -> list[Run]:
    """Train the waiting runs, one after another; those that failed."""
    longest, failed = 0.0, list[Run]()
    for run in waiting:
        began = time.monotonic()
        if began + longest > deadline:
            print(f"{run}: not begun, the longest run so far took {longest / 60:.1f} minutes", flush=True)
            break
        print(f"{run}: {(deadline - began) / 60:.1f} minutes are left", flush=True)
        try:
            if not train(run, settings, place, deadline, over):
                print(f"{run}: stopped before its end; it is made anew the next time", flush=True)
                break
        except subprocess.CalledProcessError as error:
            print(f"{run}: failed with exit code {error.returncode}: {error.output}", flush=True)
            failed.append(run)
        longest = max(longest, time.monotonic() - began)
    return failed


def list_all(args: argparse.Namespace) -> None:
    """Print the state of every run."""
    for name, (_, method) in RUNS.items():
        searched = sum(Run(name, each, searched=True).file(args.results).exists() for each in method.settings)
        best = chosen(name, args.results)
        stored = [seed for seed in args.seeds if Run(name, best, seed).file(args.results).exists()]
        print(
            f"{name:22} {searched} of {len(method.settings)} settings searched; seeds {stored} of {args.seeds} stored "
            f"({best})"
        )


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "search", "list", "report"))
    parser.add_argument("overrides", nargs="*", help="run: configuration keys for every run, dotted.key=value")
    parser.add_argument("--results", type=Path, default=STORED, help="folder of the stored runs (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="run: then end, also what is under way")
    parser.add_argument(
        "--only", nargs="+", choices=RUNS, default=ON_DEMO,
        help="run: these; keys come before (default: all of gpu_demo's models)",
    )  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="run: these (%(default)s)")
    parser.add_argument("--models", type=Path, help="run: a folder that python -m hybrid_gkd.demo gpu_demo has made")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="run: default is what there is")
    parser.add_argument("--steps", type=int, help="run: training steps (default: those of 5.1M tokens on a GPU)")
    parser.add_argument("--together", type=int, default=1, help="run: so many at a time on each visible GPU")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="report: where it is written (%(default)s)")
    args = parser.parse_intermixed_args()
    if args.what == "report":
        titles = {
            regime: (REGIMES[regime].title, {f"{regime}-{name}": method.title for name, method in each.methods.items()})
            for regime, each in REGIMES.items()
        }
        report(args.results, titles, args.docs)
    elif args.what == "list":
        list_all(args)
    else:
        run_all(args)


if __name__ == "__main__":
    main()

"""Compare TRL's on-policy distillation with this program on the same card: step time, throughput, peak memory.

    python benchmarks/peers.py                                            # one GPU, both kinds of lengths
    python benchmarks/peers.py --lengths log-normal --trl-micro-batch 2 4 8
    python benchmarks/peers.py --trl-micro-batch fixed=16 log-normal=4 --steps 2 --warmup 1 --folder /tmp/peers
    python benchmarks/peers.py --device cpu                               # a functional test, no measurement

Random weights in the shapes of Qwen2.5, the same prompts in the same order, fp32 master weights and bf16 computation,
each step generated with the weights of the previous one. Completions have one length, or log-normal lengths with a
cap; each prompt's completion has the same length in both (benchmarks/answer_lengths.py), and runs whose steps differ in
tokens are refused.

This program runs config/one_gpu.yaml, with all offloads and a teacher process, and has the forward KL on the teacher's
top 64 (distillation.topk). TRL's DistillationTrainer (1.16 or newer) has vLLM colocated without sleep mode, the teacher
in the same process, everything on the card, no gradient checkpointing, Liger's layers where liger-kernel is installed
(CUDA alone; TRL gives them to the student, not to the teacher), and the forward KL over the whole vocabulary: it knows
no K, and refuses a teacher with another number of embeddings. Its micro-batches have as many sequences as fit into
--micro-tokens with their padding, or --trl-micro-batch, of which the fastest counts; one that is out of memory is tried
again with half as many. Further settings of its DistillationConfig: --trl vllm_gpu_memory_utilization=0.5
torch_compile=true. Attention is transformers' default; flash-attn, where it is installed, has to be asked for by
model_init_kwargs.

TRL 1.16 calls the student past the autocast that bf16=True asks for, and computes its passes in fp32: with
--trl-precision autocast, the default, its loss is computed in accelerate's autocast; with `released` as it is.

A step lasts from its predecessor's end to its own; medians of the counted steps. Tokens are those of prompts and
completions, without padding. Memory is the maximum of nvidia-smi's memory in use on the card, sampled ten times a
second during a run, allocator caches and vLLM's reservation included; it is not measured on the CPU. A row is printed
as soon as it is measured; a failed or unfinished run has its reason, and the others continue.

TRL lives in this Python, or in that of --trl-python, which needs trl, vllm, accelerate and datasets.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import ENVIRONMENT, ROOT, call, device_name

from hybrid_gkd.runtime.files import read_json_lines

OLDEST_TRL = (1, 16)
NEEDED = ("trl", "vllm", "accelerate", "datasets")
FIND = f"""
import importlib.metadata as metadata, importlib.util as util, json
found = {{}}
for name in {(*NEEDED, "liger_kernel")}:
    for distribution in (name, f"{{name}}-cpu") if util.find_spec(name) else ():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            pass
print(json.dumps(found))
"""
SIZES = {
    # device: student, teacher, prompts of a step, their tokens, answers of one length, median and cap of log-normal
    "cuda": ("0.5b", "1.5b", 128, 256, 512, 300, 4096),
    "cpu": ("tiny", "tiny", 8, 16, 24, 16, 64),
}
TEMPLATE = 8
"""Tokens that a chat template may add to a prompt."""
KINDS = ("fixed", "log-normal")
PRECISIONS = {"autocast": "bf16 autocast", "released": "as released"}
USED_BEFORE, EMPTY_WITHIN = 2 * 1024, 60.0
"""MiB that a card without processes may have in use; seconds after the run before."""


def trl_versions(python: str) -> dict[str, str]:
    """Return the versions of TRL's packages in its Python. Raises SystemExit: packages are missing."""
    try:
        done = subprocess.run(
            [python, "-c", FIND], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=60,
            check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"--trl-python {python} is no Python that runs: {error}") from error
    found: dict[str, str] = json.loads(done.stdout)
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise SystemExit(
            f"{python} has no {', no '.join(missing)}: install it there (pip install --no-deps trl, if the others are "
            "there), or name another Python with --trl-python"
        )
    if tuple(map(int, re.findall(r"\d+", found["trl"])[:2])) < OLDEST_TRL:
        raise SystemExit(f"{python} has TRL {found['trl']}, this needs {'.'.join(map(str, OLDEST_TRL))} or newer")
    return found


def check_settings(python: str, settings: dict[str, Any]) -> None:
    """Raises SystemExit: one that TRL's DistillationConfig does not have."""
    command = "from trl import DistillationConfig; print('known:', *DistillationConfig.__dataclass_fields__)"
    done = subprocess.run(
        [python, "-c", command], env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    if unknown := set(settings) - set(done.stdout.rpartition("known:")[2].split()):
        raise SystemExit(f"--trl: DistillationConfig has no {', '.join(sorted(unknown))}")


@contextlib.contextmanager
def peak_memory(device: str) -> Iterator[list[int]]:
    """A list that ends as [MiB in use on the card at most], or stays empty on the CPU.

    Raises SystemExit: something else is on the card, or nvidia-smi says too little.
    """
    found: list[int] = []
    if device == "cpu":
        yield found
        return
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    deadline = time.monotonic() + EMPTY_WITHIN
    while (before := int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)) > USED_BEFORE:
        if time.monotonic() > deadline:
            raise SystemExit(f"GPU {gpu} has {before} MiB in use, which would be counted: nothing else may run on it")
        time.sleep(1)
    samples, began = [before], time.monotonic()
    with subprocess.Popen([*command, "--loop-ms=100"], stdout=subprocess.PIPE, text=True) as sampler:
        lines: Any = sampler.stdout
        reader = threading.Thread(target=lambda: samples.extend(map(int, lines)))
        reader.start()
        try:
            yield found
        finally:
            sampler.terminate()
            reader.join(60)
    seconds = time.monotonic() - began
    if len(samples) < seconds:
        raise SystemExit(f"nvidia-smi gave {len(samples)} values of memory in {seconds:.0f} s: no peak is known")
    found.append(max(samples))


def deadline(args: argparse.Namespace) -> float:
    """Return the deadline of a run that begins now, by the monotonic clock."""
    return min(args.ends, time.monotonic() + 60 * args.minutes)


def make_model(args: argparse.Namespace, folder: Path, name: str, shape: str) -> None:
    """One that is there in this shape stays."""
    made = folder / f"{name}.made"
    if made.is_file() and made.read_text(encoding="utf-8") == shape:
        return
    made.unlink(missing_ok=True)
    shutil.rmtree(folder / name, ignore_errors=True)
    # In a process of its own, which takes its memory on the card away with it.
    command = [sys.executable, ROOT / "benchmarks" / "models.py", folder / name, "--shape", shape]
    call(command, folder / f"{name}.log", deadline(args))
    config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 32768  # as Qwen2.5
    (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made.write_text(shape, encoding="utf-8")


def make_inputs(args: argparse.Namespace, folder: Path) -> None:
    """Models and prompts."""
    with ThreadPoolExecutor() as pool:
        shapes = {"student": args.student_shape, "teacher": args.teacher_shape}
        list(pool.map(lambda name: make_model(args, folder, name, shapes[name]), shapes))
    letters = np.random.default_rng(0).choice(
        list("abcdefghijklmnopqrstuvwxyz "), ((args.warmup + args.steps) * args.prompts, args.prompt_length)
    )
    rows = "\n".join(json.dumps({"prompt": "".join(line)}) for line in letters)
    (folder / "prompts.jsonl").write_text(rows, encoding="utf-8")


def run_program(args: argparse.Namespace, folder: Path, longest: int, lengths: str) -> list[dict[str, float]]:
    """Train with this program: the rows of its steps."""
    runs, teacher = folder / f"runs_{lengths}", "actor_rollout_ref.teacher.model.path"
    shutil.rmtree(runs, ignore_errors=True)
    command = [
        sys.executable, "-m", "hybrid_gkd", "--config-name", "one_gpu", f"trainer.device={args.device}",
        f"actor_rollout_ref.model.path={folder / 'student'}", f"{teacher}={folder / 'teacher'}",
        "actor_rollout_ref.rollout.name=answer_lengths:rollout_engine",
        f"actor_rollout_ref.rollout.max_num_seqs={args.prompts}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={args.micro_tokens}",
        "actor_rollout_ref.actor.optim.lr=1e-12",
        f"data.train_files={folder / 'prompts.jsonl'}", "data.shuffle=false", f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={args.prompt_length + TEMPLATE}", f"data.max_response_length={longest}",
        "trainer.logger=[jsonl]", "trainer.save_freq=0",
        f"trainer.total_training_steps={args.warmup + args.steps}", f"trainer.default_local_dir={runs}",
        *args.overrides,
    ]  # fmt: skip
    call(command, folder / f"program_{lengths}.log", deadline(args), ANSWER_LENGTHS=lengths)
    (file,) = runs.rglob("metrics.jsonl")
    before, found = 0.0, []
    for row in read_json_lines(file):
        found.append({
            "seconds": row["timing/elapsed"] - before,
            "answer_tokens": round(row["response_length/mean"] * args.prompts),
            "longest": round(row["response_length/max"]),
            "tokens": round(row["perf/tokens_per_second"] * row["timing/step"]),
        })  # fmt: skip
        before = row["timing/elapsed"]
    return found


def run_trl(
    args: argparse.Namespace, folder: Path, longest: int, lengths: str, micro_batch: int, liger: bool, precision: str
) -> tuple[list[dict[str, float]], str, bool]:
    """Train with TRL: the rows of its steps, what ended it before the last one, and whether that was want of memory."""
    settings = {
        "max_steps": args.warmup + args.steps, "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": args.prompts // micro_batch, "max_completion_length": longest,
        "learning_rate": 1e-12, "vllm_max_model_length": args.prompt_length + TEMPLATE + longest,
        "use_liger_kernel": liger, **args.trl,
    }  # fmt: skip
    name = f"trl_{lengths}_{micro_batch}_{precision}"
    rows, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    spec = {
        "device": args.device, "folder": str(folder / "trl"), "rows": str(rows), "settings": settings,
        "student": str(folder / "student"), "teacher": str(folder / "teacher"),
        "prompts": str(folder / "prompts.jsonl"), "autocast": precision == "autocast",
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(spec), encoding="utf-8")
    rows.write_text("", encoding="utf-8")
    command, error = [args.trl_python, ROOT / "benchmarks" / "peers_trl.py", folder / f"{name}.json"], ""
    try:
        call(command, log, deadline(args), ANSWER_LENGTHS=lengths)
    except SystemExit as failure:
        error = str(failure)
    found = list(read_json_lines(rows))
    return found, error, bool(error) and "out of memory" in log.read_text(errors="replace", encoding="utf-8")


def micro_batches(args: argparse.Namespace, longest: int) -> list[int]:
    """Sequences of TRL's micro-batches, all divisors of the batch; TRL pads each to the longest of the whole batch."""
    if args.trl_micro_batch:
        return list(args.trl_micro_batch)
    most = max(1, args.micro_tokens // (args.prompt_length + TEMPLATE + longest))
    return [largest_divisor(args.prompts, most)]


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of the number, `most` at most."""
    return max(size for size in range(1, most + 1) if number % size == 0)


def figures(rows: list[dict[str, float]], warmup: int, peak: list[int]) -> dict[str, float]:
    """Return median seconds, tokens per second and peak GiB of the counted steps."""
    counted = rows[warmup:]
    return {
        "step": statistics.median(row["seconds"] for row in counted),
        "tokens_per_second": sum(row["tokens"] for row in counted) / sum(row["seconds"] for row in counted),
        "peak": peak[0] / 1024 if peak else float("nan"),
    }


def check_same_tokens(ours: list[dict[str, float]], theirs: list[dict[str, float]], steps: int) -> None:
    """Raises SystemExit unless both trained the same number of tokens in every step, and all steps."""
    keys = ("answer_tokens", "tokens", "longest")
    here, there = ([tuple(row[key] for key in keys) for row in rows] for rows in (ours, theirs))
    if len(here) != steps or here != there:
        raise SystemExit(
            f"not the same work, {keys} of each of {steps} steps: {here} in this program, {there} in TRL: no figures"
        )


def print_row(name: str, found: dict[str, float] | None, error: str = "") -> None:
    """A row of the table, with what went wrong."""
    cells = ["", "", ""]
    if found:
        memory = "not measured" if np.isnan(found["peak"]) else f"{found['peak']:.1f}"
        cells = [f"{found['step']:.3g}", f"{found['tokens_per_second']:.0f}", memory]
    if error:
        lines = error.strip().splitlines()
        # The last line that names an exception; vLLM and Python's threads may go on after it.
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        name = " ".join([f"{name}: {lines[0].rstrip(': ')}", *(line[:200] for line in named[-1:])])
    print("| " + " | ".join([name.replace("|", "/"), *cells]) + " |", flush=True)


def compare(args: argparse.Namespace, folder: Path, kind: str, versions: dict[str, str]) -> bool:
    """Run both with one kind of lengths and print the figures as a Markdown table: whether nothing failed."""
    median, sigma, longest = {
        "fixed": (args.response_length, 0.0, args.response_length),
        "log-normal": (args.median_length, args.sigma, args.longest),
    }[kind]
    lengths = f"{median},{sigma},{longest}"
    print(
        f"\n{kind} lengths: {args.prompts} prompts of {args.prompt_length} tokens, {args.student_shape} student, "
        f"{args.teacher_shape} teacher, {args.steps} steps\n\n"
        "| | seconds a step | tokens per second | peak memory, GiB |\n|---|---|---|---|",
        flush=True,
    )
    rows, own, found, failures = [], None, [], {}
    own_name = ", ".join(["this program", *args.overrides])
    try:
        with peak_memory(args.device) as peak:
            rows = run_program(args, folder, longest, lengths)
        own = figures(rows, args.warmup, peak)
        print_row(own_name, own)
    except SystemExit as error:
        failures[own_name] = str(error)
        print_row(own_name, None, str(error))
    well = not failures
    liger = args.device == "cuda" and "liger_kernel" in versions
    changed = [f"{key}={value}" for key, value in args.trl.items()]
    sizes = args.trl_micro_batch_of[kind] or micro_batches(args, longest)
    waiting = [(size, precision) for precision in args.trl_precision for size in sizes]
    while waiting:
        size, precision = waiting.pop(0)
        label = [f"TRL {versions['trl']}", f"micro-batches of {size}", *changed]
        if args.trl.get("bf16", args.device == "cuda"):
            label.insert(2, PRECISIONS[precision])
        if liger:
            label.insert(2, "Liger")
        theirs: list[dict[str, float]] = []
        why, short, measured = "", False, None
        try:
            with peak_memory(args.device) as peak:
                theirs, why, short = run_trl(args, folder, longest, lengths, size, liger, precision)
            done = len(theirs) if why else args.warmup + args.steps
            if rows:
                check_same_tokens(rows[:done], theirs, done)
            if done > args.warmup:
                measured = figures(theirs, args.warmup, peak)
                found.append(measured)
                label += [f"{done - args.warmup} of {args.steps} steps"] * bool(why)
        except SystemExit as failure:
            why = why or str(failure)
        print_row(name := ", ".join(label), measured, why)
        if why:
            failures[name] = why
        if again := short and size > 1:
            smaller = largest_divisor(args.prompts, size // 2), precision
            waiting[:0] = [smaller] if smaller not in waiting else []
        well = well and (not why or again)
    if own and found:
        fastest = min(found, key=lambda each: each["step"])
        ratios = {key: fastest[key] / own[key] for key in ("step", "tokens_per_second", "peak")}
        memory = "not measured" if np.isnan(ratios["peak"]) else f"{ratios['peak']:.2f}"
        print(
            f"| TRL at its fastest / this program | {ratios['step']:.2f} | {ratios['tokens_per_second']:.2f} | "
            f"{memory} |"
        )
    if counted_rows := rows[args.warmup :]:
        mean = sum(row["answer_tokens"] for row in counted_rows) / len(counted_rows) / args.prompts
        most = max(row["longest"] for row in counted_rows)
        print(f"\nAnswers of {mean:.0f} tokens in the mean and {most} at most, the same in both.", flush=True)
    for name, why in failures.items():
        print(f"\n{name}: {why}", file=sys.stderr, flush=True)
    return well


def trl_setting(text: str) -> tuple[str, Any]:
    """key=value, with a value of JSON or plain text."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text} is not key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def micro_batch(text: str) -> tuple[str | None, int]:
    """SIZE, or KIND=SIZE for one kind of lengths."""
    kind, equals, size = text.rpartition("=")
    if not size.isdigit() or (equals and kind not in KINDS):
        raise argparse.ArgumentTypeError(f"{text} is neither a number nor {'=N or '.join(KINDS)}=N")
    return kind or None, int(size)


def arguments() -> argparse.Namespace:
    """Return the arguments of the command line, with the sizes of the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="configuration keys of this program, dotted.key=value")
    parser.add_argument("--device", choices=SIZES, default="cuda", help="and its sizes (%(default)s)")
    parser.add_argument("--trl-python", default=sys.executable, help="Python with TRL (default: this one)")
    parser.add_argument("--trl", nargs="+", type=trl_setting, default=[], help="settings of TRL's DistillationConfig")
    parser.add_argument(
        "--trl-micro-batch", nargs="+", type=micro_batch, default=[],
        help="sequences, for one kind of lengths with its name (log-normal=4); runs TRL with each",
    )  # fmt: skip
    parser.add_argument(
        "--trl-precision", nargs="+", choices=PRECISIONS, default=["autocast"],
        help="see above; runs TRL with each (autocast)",
    )  # fmt: skip
    parser.add_argument("--micro-tokens", type=int, default=16384, help="of a micro-batch of both (%(default)s)")
    parser.add_argument("--lengths", nargs="+", choices=KINDS, default=KINDS, help="of the answers (both)")
    parser.add_argument("--student-shape", help="see benchmarks/models.py")
    parser.add_argument("--teacher-shape", help="with as many embeddings")
    parser.add_argument("--prompts", type=int, help="of a step")
    parser.add_argument("--prompt-length", type=int, help="tokens, the chat template's aside")
    parser.add_argument("--response-length", type=int, help="fixed lengths: tokens")
    parser.add_argument("--median-length", type=int, help="log-normal lengths: tokens")
    parser.add_argument("--longest", type=int, help="log-normal lengths: tokens at most")
    parser.add_argument("--sigma", type=float, default=1.0, help="log-normal lengths: of the logarithm (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="counted (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each run that are not counted (%(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="for a run; then it has failed (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all; then no run goes on (no limit)")
    parser.add_argument("--folder", type=Path, help="of models and logs, which stay; models in it are used again")
    args = parser.parse_intermixed_args()
    names = (
        "student_shape", "teacher_shape", "prompts", "prompt_length", "response_length", "median_length", "longest",
    )  # fmt: skip
    for name, size in zip(names, SIZES[args.device], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.trl = dict(args.trl)
    numbers = ("prompts", "prompt_length", "response_length", "median_length", "longest", "steps", "warmup")
    for name in numbers:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, is {getattr(args, name)}")
    args.ends = time.monotonic() + args.seconds
    if wrong := [size for _, size in args.trl_micro_batch if size < 1 or args.prompts % size]:
        parser.error(f"--trl-micro-batch must divide --prompts {args.prompts}, is {wrong[0]}")
    args.trl_micro_batch_of = {kind: [size for of, size in args.trl_micro_batch if of == kind] for kind in KINDS}
    args.trl_micro_batch = [size for of, size in args.trl_micro_batch if of is None]
    return args


def main() -> None:
    """Measure and print."""
    args = arguments()
    versions = trl_versions(args.trl_python)  # before anything large is imported or started
    if args.trl:
        check_settings(args.trl_python, args.trl)
    from models import SHAPES

    for name in (args.student_shape, args.teacher_shape):
        if name not in SHAPES:
            raise SystemExit(f"there is no shape {name}: {', '.join(SHAPES)}")
    if SHAPES[args.student_shape][5] != SHAPES[args.teacher_shape][5]:
        raise SystemExit(f"TRL needs as many embeddings in both: {args.student_shape} and {args.teacher_shape} differ")
    device = f"CPU ({os.cpu_count()} cores)"
    if args.device == "cuda":
        device = device_name("cuda")
    print(f"{device}; TRL's Python has {', '.join(' '.join(each) for each in versions.items())}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = (args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(args, folder)
        well = [compare(args, folder, kind, versions) for kind in args.lengths]
    if args.device == "cpu":
        print("\nTiny models on a CPU: these figures say that it works, not which of the two is faster.")
    if not all(well):
        raise SystemExit("not everything was measured: see the tables")


if __name__ == "__main__":
    main()

"""Compare steps with two teachers, each for half of the rows, with steps of the first teacher alone.

    python benchmarks/several_teachers.py                        # two GPUs: the student's, and both teachers'
    python benchmarks/several_teachers.py --shape tiny --device cpu --prompts 8 --response-length 16

Random weights in the shapes of Qwen2.5; the learning rate is too small to change a weight, and hardly any completion
ends early. Both kinds of run take turns, each in a process of its own; a step is the median of `timing/step` without
the first two, and the ratio is that of the medians of a turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import call, device_name
from models import SHAPES, full_tokenizer, make_model
from schedules import make_inputs

from hybrid_gkd.runtime.files import read_json_lines

WARMUP = 2
"""Steps that are not counted."""
COLUMNS = ("step", "gen", "update_actor", "get_teacher_knowledge")


def main() -> None:
    """Print a row for each run, and the ratio of each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="of all models")
    parser.add_argument("--student-shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--teacher-shape", choices=SHAPES, default="7b")
    parser.add_argument("--second-shape", choices=SHAPES, default="1.5b", help="of the second teacher (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--response-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8, help="of a run (%(default)s)")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="for a run; then it has failed (%(default)s)")
    parser.add_argument("overrides", nargs="*", help="configuration keys")
    args = parser.parse_intermixed_args()
    if args.shape is not None:
        args.student_shape = args.teacher_shape = args.second_shape = args.shape
    args.mean_length, args.warmup, args.schedules = 100_000, 0, ["sync"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        inputs = make_inputs(args, folder)
        prompts = folder / "prompts.jsonl"
        rows = [row | {"data_source": "ab"[number % 2]} for number, row in enumerate(read_json_lines(prompts))]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        second = make_model(folder / "second", args.second_shape, full_tokenizer(args.student_shape))
        added = ["distillation.teacher_models.b.key=b", f"distillation.teacher_models.b.model_path={second}"]
        print(
            f"{device_name(args.device)}, student {args.student_shape}, teachers {args.teacher_shape} and "
            f"{args.second_shape}, {args.prompts} prompts of {args.prompt_length} tokens, completions of "
            f"{args.response_length}; seconds\n\n| teachers | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|"
        )
        for turn in range(args.turns):
            step = {}
            for name, own in (("one", []), ("two", added)):
                found = measure(args, folder, f"{name}{turn}", [*inputs, *own])
                print(f"| {name} | {' | '.join(f'{found[column]:.2f}' for column in COLUMNS)} |", flush=True)
                step[name] = found["step"]
            print(f"\ntwo teachers / one: {step['two'] / step['one']:.3f}\n", flush=True)


def measure(args: argparse.Namespace, folder: Path, name: str, own: list[str]) -> dict[str, float]:
    """Train; return the median of each of COLUMNS."""
    command = [
        sys.executable, "-m", "hybrid_gkd", "--config-name", "gkd", *own, f"trainer.device={args.device}",
        f"trainer.experiment_name={name}", "trainer.logger=[jsonl]", "trainer.save_freq=0",
        f"trainer.total_training_steps={args.steps}", "trainer.n_gpus_per_node=1",
        f"data.train_batch_size={args.prompts}", f"data.max_prompt_length={args.prompt_length + 8}",
        f"data.max_response_length={args.response_length}", "actor_rollout_ref.actor.optim.lr=1e-12",
        *args.overrides,
    ]  # fmt: skip
    call(command, folder / f"{name}.log", time.monotonic() + 60 * args.minutes)
    steps = list(read_json_lines(next((folder / "runs").glob(f"*/{name}/metrics.jsonl"))))[WARMUP:]
    return {column: statistics.median(step[f"timing/{column}"] for step in steps) for column in COLUMNS}


if __name__ == "__main__":
    main()

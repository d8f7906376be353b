"""Measure a run's start, from the command to the first completions: the first time on a machine and the second.

    python benchmarks/start.py --config-name one_gpu --student-shape 1.5b --teacher-shape 7b
    python benchmarks/start.py --shape tiny --device cpu --prompt-length 16 --response-length 16

Random weights in the shapes of Qwen2.5, read from the disk's cache. Each start is a process of its own, as a user types
it; the first has empty caches of vLLM, torch and Triton, the second those of the first. Seconds since the command:
"checked" when all checks are done and the models begin to load; "teacher" and "workers" when they have loaded;
"generates" when the engine gets the first prompts; "answers" when the first batch is complete; "step" when the first
step is done.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from common import call
from models import SHAPES
from schedules import make_inputs

from hybrid_gkd.reporting.logs import RUN_LOG
from hybrid_gkd.reporting.starts import STARTS
from hybrid_gkd.runtime.files import read_json_lines

CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
MOMENTS = ("checked", "teacher", "workers", "generates", "answers", "step")


def moments(run_dir: Path, began: float) -> dict[str, float]:
    """Seconds since `began` of each of MOMENTS."""
    start, *_ = rows = list(read_json_lines(run_dir / STARTS))
    assert rows[-1]["error"] is None, rows[-1]["error"]
    spans = [event for event in json.loads((run_dir / "trace.json").read_text(encoding="utf-8")) if event["ph"] == "X"]

    ready = re.search(
        r"teacher of this run was ready after ([0-9.]+) s", (run_dir / RUN_LOG).read_text(encoding="utf-8")
    )
    assert ready is not None, "the log does not say when the teacher was ready"
    answers = min((e for e in spans if e["name"] == "gen" and e["pid"] != 1), key=lambda e: e["ts"])  # a worker's
    found = {
        "checked": start["start"], "teacher": start["start"] + float(ready[1]),
        "workers": max(e["ts"] + e["dur"] for e in spans if e["name"] == "initialize") / 1e6,
        "generates": answers["ts"] / 1e6, "answers": (answers["ts"] + answers["dur"]) / 1e6,
        "step": max(e["ts"] + e["dur"] for e in spans if e["name"] == "update_actor") / 1e6,
    }  # fmt: skip
    return {name: moment - began for name, moment in found.items()}


def main() -> None:
    """Print a row for each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="of student and teacher")
    parser.add_argument("--student-shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--teacher-shape", choices=SHAPES, default="7b")
    parser.add_argument("--config-name", default="gkd")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--response-length", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=15.0, help="for a start; then it has failed (%(default)s)")
    parser.add_argument("overrides", nargs="*", help="configuration keys")
    args = parser.parse_intermixed_args()
    if args.shape is not None:
        args.student_shape = args.teacher_shape = args.shape
    args.mean_length, args.steps, args.warmup, args.schedules = 100_000, 1, 0, ["sync"]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        common = [
            *make_inputs(args, folder), f"trainer.device={args.device}", "trainer.logger=[jsonl]",
            "trainer.save_freq=0", "trainer.total_training_steps=1", f"data.train_batch_size={args.prompts}",
            f"data.max_prompt_length={args.prompt_length + 8}", f"data.max_response_length={args.response_length}",
            *args.overrides,
        ]  # fmt: skip
        caches = {name: str(folder / "caches" / name) for name in CACHES}
        for name in ("first", "second"):
            command = [sys.executable, "-m", "hybrid_gkd", "--config-name", args.config_name, *common]
            command += [f"trainer.experiment_name={name}"]
            began = time.time()
            call(command, folder / f"{name}.log", time.monotonic() + 60 * args.minutes, **caches)
            rows.append([name, moments(next((folder / "runs").glob(f"*/{name}")), began)])
            print(rows[-1], flush=True)
    print(f"\nstudent {args.student_shape}, teacher {args.teacher_shape}, {args.config_name}, {args.device}; seconds\n")
    print(f"| start | {' | '.join(MOMENTS)} |\n{'|---' * (len(MOMENTS) + 1)}|")
    for name, found in rows:
        print(f"| {name} | {' | '.join(f'{found[moment]:.1f}' for moment in MOMENTS)} |")


if __name__ == "__main__":
    main()

"""Measure the cost of report.html for a run: the processor's time of the process that writes it, and the page's size.

    python benchmarks/report.py                 # runs of 100, 1,000 and 10,000 steps, three seconds a step

The folder is written by the code that writes those of runs, with sixty metrics a step. The process reads it once, then
ten more steps for each further report, which are 30 s apart in a run. The fraction is processor seconds of such a
report per 30 s of one core, at the lowest priority.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.reporting.metric_table import METRICS, PATTERNS
from hybrid_gkd.reporting.report.command import EVERY_SECONDS
from hybrid_gkd.reporting.report.page import REPORT, write_report
from hybrid_gkd.reporting.report.run_folder import RunFolder
from hybrid_gkd.reporting.trackers import Tracking
from hybrid_gkd.types import Generation, RunInfo

NAMES = [name for name in METRICS if name not in PATTERNS][:60]
ANSWERS, VALIDATE_EVERY, BATCH = 8, 50, 256
NEW_STEPS, WRITINGS = 10, 5


def write_steps(tracking: Tracking, steps: range) -> None:
    """Return the rows that a run writes for these steps, some with a validation."""
    for step in steps:
        row = {name: step / (number + 7) for number, name in enumerate(NAMES)}
        tracking.log_lengths([(step * 31 + number * 17) % 512 for number in range(BATCH)], step)
        if step % VALIDATE_EVERY == 0:
            text = "so many words of an answer " * 40
            samples = [Generation(prompt=f"{n} {text}", response=text, answer=text, reward=0.0) for n in range(ANSWERS)]
            tracking.log_generations(samples, step)
        tracking.log(row | {"timing/step": 3.0, "timing/gen": 1.0, "timing/update_actor": 2.0}, step)


def measure(steps: int, folder: Path) -> None:
    """Print the row of a run of so many steps."""
    where = [f"trainer.default_local_dir={folder}", f"trainer.experiment_name=run{steps}"]
    config = load_config(where, config_name="demo")
    config.run_dir.mkdir(parents=True)
    info = RunInfo(
        project_name="p", experiment_name="run", run_dir=config.run_dir, config=asdict(config),
        total_steps=steps + NEW_STEPS * WRITINGS, resume=False, start_step=0,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        tracking = stack.enter_context(Tracking([], info))
        write_steps(tracking, range(1, steps + 1))
        run, seconds = RunFolder(config.run_dir), []
        for writing in range(1 + WRITINGS):
            before = time.process_time()
            page = write_report([run], run.path / REPORT)
            seconds.append(time.process_time() - before)
            begin = steps + 1 + writing * NEW_STEPS
            write_steps(tracking, range(begin, begin + NEW_STEPS))
    each = max(seconds[1:])
    size, share = page.stat().st_size / 1e6, each / EVERY_SECONDS
    print(f"{steps:>8,} | {size:>7.2f} | {seconds[0]:>12.2f} | {each:>12.2f} | {share:>15.2%}", flush=True)


def main() -> None:
    """Measure runs of several lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 1000, 10_000])
    args = parser.parse_args()
    print("   steps | page MB | first, CPU s | later, CPU s | share of a core")
    with tempfile.TemporaryDirectory() as folder:
        for steps in args.steps:
            measure(steps, Path(folder))


if __name__ == "__main__":
    main()

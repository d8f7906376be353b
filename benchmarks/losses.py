"""The demo task with every loss, three seeds each: a table of where each ends, and a plot of the way there.

    python benchmarks/losses.py --folder outputs/losses            # trains (about a minute each), then draws
    python benchmarks/losses.py --folder outputs/losses --draw     # draws the runs that are there
    python benchmarks/losses.py --folder outputs/losses --only k2 k3 --seeds 0

Every run is the program itself on config/demo.yaml with the overrides of RUNS; its seed decides the order of the
prompts and what is sampled, models and data are the same. Table and plot come from the runs' metrics.jsonl alone: means
over the seeds, with the lowest and the highest in the table. The plot is written to docs/losses.svg, the table printed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = "distillation.mixed_weights.forward_kl=0.5 distillation.mixed_weights.reverse_kl=0.5"
GROUPS = "data.train_batch_size=32 actor_rollout_ref.rollout.n=4"  # the recipe's 128 answers, four to a prompt
POLICY = "distillation.use_policy_gradient=true"
RUNS = {
    # name: overrides of config/demo.yaml
    "forward_kl": "distillation.loss_mode=forward_kl",
    "reverse_kl": "distillation.loss_mode=reverse_kl",
    "jsd": "distillation.loss_mode=jsd",
    "mixed": f"distillation.loss_mode=mixed {WEIGHTS}",
    "k1_policy": f"distillation.loss_mode=k1 {POLICY}",
    "k2": "distillation.loss_mode=k2",
    "k3": "distillation.loss_mode=k3",
    "rewards": f"distillation.use_task_rewards=true {GROUPS}",
    # What explains them.
    "rewards_none": GROUPS,
    "k2_half_lr": "distillation.loss_mode=k2 actor_rollout_ref.actor.optim.lr=2e-3",
    "k2_batch_512": "distillation.loss_mode=k2 data.train_batch_size=512 actor_rollout_ref.rollout.max_num_seqs=512",
    "k3_batch_512": "distillation.loss_mode=k3 data.train_batch_size=512 actor_rollout_ref.rollout.max_num_seqs=512",
    # What the tail does, with four candidates only.
    **{
        f"{mode}_top4_{tail}": f"distillation.loss_mode={mode} distillation.topk=4 distillation.tail={tail}"
        for mode in ("forward_kl", "reverse_kl")
        for tail in ("bucket", "none", "renormalise")
    },
}
PLOTTED = ("forward_kl", "reverse_kl", "jsd", "mixed", "k1_policy", "k2", "k3", "rewards")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe and Ito
SEEDS = ("data.seed", "actor_rollout_ref.rollout.seed", "trainer.seed")
KL, ACCURACY = "actor/distillation/forward_kl", "val/accuracy"
Run = list[dict[str, float]]
"""The rows of a run's metrics.jsonl."""
LAST_STEPS = 10
"""Steps whose mean stands for the end of a run."""


def train(name: str, seed: int, folder: Path) -> None:
    """One run; the program's own error ends this one."""
    command = [
        sys.executable, "-m", "hybrid_gkd", "--config-name", "demo", *RUNS[name].split(), "trainer.test_freq=10",
        "trainer.save_freq=0", f"trainer.experiment_name={name}_{seed}", f"trainer.default_local_dir={folder}",
        *(f"{key}={seed}" for key in SEEDS),
    ]
    subprocess.run(command, cwd=ROOT, check=True)


def read(name: str, seeds: list[int], folder: Path) -> list[Run]:
    """What there is of the runs with this name, one for each seed."""
    files = [folder / "hybrid_gkd" / f"{name}_{seed}" / "metrics.jsonl" for seed in seeds]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files if file.exists()]


def ends(run: Run) -> list[float]:
    """Accuracy, both divergences, entropy and gradient norm at the end of a run."""
    last = [row for row in run if KL in row][-LAST_STEPS:]
    names = (KL, "actor/distillation/reverse_kl", "actor/entropy", "actor/grad_norm")
    accuracy = [row[ACCURACY] for row in run if ACCURACY in row][-1]
    return [100 * accuracy, *(sum(row[name] for row in last) / len(last) for name in names)]


def table(runs: dict[str, list[Run]]) -> str:
    """Markdown: where the runs ended, mean over the seeds and lowest to highest."""
    lines = [
        "| run | accuracy in % | KL(teacher, student) | KL(student, teacher) | entropy | gradient norm |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in runs.items():
        cells = []
        for digits, values in zip((1, 3, 3, 3, 2), zip(*map(ends, each), strict=True), strict=True):
            mean, low, high = (f"{x:.{digits}f}" for x in (sum(values) / len(values), min(values), max(values)))
            cells.append(mean if low == high else f"{mean} ({low} to {high})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_by_step(runs: list[Run], metric: str) -> list[tuple[float, float]]:
    """(step, mean over the runs) where all of them have the metric."""
    found: dict[float, list[float]] = {}
    for row in (row for run in runs for row in run if metric in row):
        found.setdefault(row["step"], []).append(row[metric])
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items()) if len(values) == len(runs)]


class Panel:
    """One set of axes in an SVG: `points` are (step, value) in data units."""

    WIDTH, HEIGHT, TOP = 330, 260, 34

    def __init__(self, left: int, title: str, steps: float, low: float, high: float, ticks: list[float], log: bool):
        self.left, self.steps, self.log = left, steps, log
        self.low, self.high = (math.log(low), math.log(high)) if log else (low, high)
        bottom, right = self.TOP + self.HEIGHT, left + self.WIDTH
        self.parts = [f'<text x="{left}" y="20" font-weight="bold">{title}</text>']
        for tick in ticks:
            y = self._y(tick)
            self.parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>')
            self.parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for step in range(0, int(steps) + 1, 20):
            x = self._x(step)
            self.parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{step}</text>')
        self.parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 34}" text-anchor="middle">step</text>')

    def line(self, points: list[tuple[float, float]], color: str) -> None:
        """A curve."""
        path = "L".join(f"{self._x(step):.1f} {self._y(value):.1f}" for step, value in points)
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')

    def _x(self, step: float) -> float:
        return self.left + self.WIDTH * step / self.steps

    def _y(self, value: float) -> float:
        value = min(max(math.log(value) if self.log else value, self.low), self.high)
        return self.TOP + self.HEIGHT * (1 - (value - self.low) / (self.high - self.low))


def plot(runs: dict[str, list[Run]]) -> str:
    """SVG: divergence by step (mean of five) and accuracy by step, means over the seeds."""
    steps = max(row["step"] for each in runs.values() for run in each for row in run)
    kl = Panel(60, "KL(teacher, student), nats per token", steps, 0.03, 3, [0.03, 0.1, 0.3, 1, 3], log=True)
    accuracy = Panel(460, "accuracy on held-out prompts", steps, 0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1], log=False)
    legend = []
    for index, (name, each) in enumerate(runs.items()):
        color = COLORS[index % len(COLORS)]
        values = mean_by_step(each, KL)
        windows = [values[max(0, i - 2) : i + 3] for i in range(len(values))]
        kl.line([(values[i][0], sum(v for _, v in window) / len(window)) for i, window in enumerate(windows)], color)
        accuracy.line(mean_by_step(each, ACCURACY), color)
        y = 46 + 20 * index
        legend.append(f'<path d="M810 {y}h22" stroke="{color}" stroke-width="3"/>')
        legend.append(f'<text x="838" y="{y + 4}">{name}</text>')
    body = "\n".join([*kl.parts, *accuracy.parts, *legend])
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="980" height="340" font-family="sans-serif" font-size="12">\n'
        f'<rect width="980" height="340" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    """Train what is asked for, then draw what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="train these")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run with each")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    folder = args.folder.absolute()
    for name in [] if args.draw else args.only:
        for seed in args.seeds:
            train(name, seed, folder)
    runs = {name: found for name in RUNS if (found := read(name, args.seeds, folder))}
    (ROOT / "docs" / "losses.svg").write_text(plot({name: rows for name, rows in runs.items() if name in PLOTTED}))
    print(table(runs))


if __name__ == "__main__":
    main()

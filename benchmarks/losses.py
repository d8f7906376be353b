"""The demo task with every loss, same seed: a table of where each ends, and a plot of the way there.

    python benchmarks/losses.py --folder outputs/losses            # trains (about a minute each), then draws
    python benchmarks/losses.py --folder outputs/losses --draw     # draws the runs that are there
    python benchmarks/losses.py --folder outputs/losses --only k2 k3

Every run is the program itself on config/demo.yaml with the overrides of RUNS. Table and plot come from the runs'
metrics.jsonl alone; the plot is written to docs/losses.svg, the table printed.
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
KL, ACCURACY = "actor/distillation/forward_kl", "val/accuracy"
LAST_STEPS = 10
"""Steps whose mean stands for the end of a run."""


def train(name: str, folder: Path) -> None:
    """One run; the program's own error ends this one."""
    command = [
        sys.executable, "-m", "hybrid_gkd", "--config-name", "demo", *RUNS[name].split(), "trainer.test_freq=10",
        "trainer.save_freq=0", f"trainer.experiment_name={name}", f"trainer.default_local_dir={folder}",
        "trainer.logger=[jsonl]",
    ]
    subprocess.run(command, cwd=ROOT, check=True)


def read(name: str, folder: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.jsonl."""
    file = folder / "hybrid_gkd" / name / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: where each run ended."""
    lines = [
        "| run | accuracy | KL(teacher, student) | KL(student, teacher) | entropy | gradient norm |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in runs.items():
        last = [row for row in rows if KL in row][-LAST_STEPS:]
        accuracy = [row[ACCURACY] for row in rows if ACCURACY in row][-1]
        names = (KL, "actor/distillation/reverse_kl", "actor/entropy", "actor/grad_norm")
        means = [sum(row[each] for row in last) / len(last) for each in names]
        lines.append(f"| `{name}` | {accuracy:.1%} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines)


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


def plot(runs: dict[str, list[dict[str, float]]]) -> str:
    """SVG: divergence by step (mean of five) and accuracy by step."""
    steps = max(row["step"] for rows in runs.values() for row in rows)
    kl = Panel(60, "KL(teacher, student), nats per token", steps, 0.03, 3, [0.03, 0.1, 0.3, 1, 3], log=True)
    accuracy = Panel(460, "accuracy on held-out prompts", steps, 0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1], log=False)
    legend = []
    for index, (name, rows) in enumerate(runs.items()):
        color = COLORS[index % len(COLORS)]
        values = [(row["step"], row[KL]) for row in rows if KL in row]
        windows = [values[max(0, i - 2) : i + 3] for i in range(len(values))]
        kl.line([(values[i][0], sum(v for _, v in window) / len(window)) for i, window in enumerate(windows)], color)
        accuracy.line([(row["step"], row[ACCURACY]) for row in rows if ACCURACY in row], color)
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
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args = parser.parse_args()
    folder = args.folder.absolute()
    for name in [] if args.draw else args.only:
        train(name, folder)
    runs = {name: read(name, folder) for name in RUNS if (folder / "hybrid_gkd" / name / "metrics.jsonl").exists()}
    (ROOT / "docs" / "losses.svg").write_text(plot({name: rows for name, rows in runs.items() if name in PLOTTED}))
    print(table(runs))


if __name__ == "__main__":
    main()

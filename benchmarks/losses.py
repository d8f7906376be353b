"""Train the demo task with every loss, three seeds each; print a table of the results and plot the curves.

    python benchmarks/losses.py --folder outputs/losses            # trains (about a minute each), then draws
    python benchmarks/losses.py --folder outputs/losses --draw     # draws the runs that are there
    python benchmarks/losses.py --folder outputs/losses --only k2 k3 --seeds 0

Every run is the program on config/demo.yaml, or the recipe in its overrides (RUNS). The seed sets the order of the
prompts and the samples; models and data are the same. Table and plot are made from the runs' metrics.jsonl: means over
the seeds, with the lowest and highest in the table. The plot is written to benchmarks/log/losses.svg.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import vl_convert
from common import ROOT

from hybrid_gkd.runtime.files import read_json_lines

WEIGHTS = "distillation.mixed_weights.forward_kl=0.5 distillation.mixed_weights.reverse_kl=0.5"
GROUPS = "data.train_batch_size=32 actor_rollout_ref.rollout.n=4"  # the recipe's 128 completions, four per prompt
POLICY = "distillation.use_policy_gradient=true"
WEAK, CONSTANT = "--config-name weak_teacher", "distillation.distillation_loss_coef_schedule=constant"
RUNS = {
    # name: overrides of config/demo.yaml, or another recipe and overrides of it
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
    # A teacher that is to be surpassed, both signals and each alone.
    "weak_teacher": WEAK,
    "weak_teacher_distillation": f"{WEAK} {CONSTANT} distillation.use_task_rewards=false",
    "weak_teacher_coef_1": f"{WEAK} distillation.distillation_loss_coef=1",
    **{
        f"weak_teacher_rewards_{rate}": f"{WEAK} distillation.enabled=false actor_rollout_ref.actor.optim.lr={rate}"
        for rate in ("2e-3", "1e-3", "5e-4")
    },
}
PLOTTED = ("forward_kl", "reverse_kl", "jsd", "mixed", "k1_policy", "k2", "k3", "rewards")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe and Ito
KL, ACCURACY = "actor/distillation/forward_kl", "val/accuracy"
Run = list[dict[str, float]]
"""The rows of a run's metrics.jsonl."""
LAST_STEPS = 10
"""Steps whose mean stands for the end of a run."""


def train(name: str, seed: int, folder: Path) -> None:
    """One run; the program's own error ends this one. Of two --config-name the last counts."""
    command = [
        sys.executable, "-m", "hybrid_gkd", "--config-name", "demo", *RUNS[name].split(), "trainer.test_freq=10",
        "trainer.save_freq=0", f"trainer.experiment_name={name}_{seed}", f"trainer.default_local_dir={folder}",
        f"trainer.seed={seed}",
    ]
    subprocess.run(command, cwd=ROOT, check=True)


def read(name: str, seeds: list[int], folder: Path) -> list[Run]:
    """Return the stored runs of this name, one for each seed."""
    files = [folder / "hybrid_gkd" / f"{name}_{seed}" / "metrics.jsonl" for seed in seeds]
    return [list(read_json_lines(file)) for file in files if file.exists()]


def ends(run: Run) -> list[float]:
    """Accuracy, both divergences (NaN without a teacher), entropy and gradient norm at the end of a run."""
    last = [row for row in run if "actor/loss" in row][-LAST_STEPS:]
    names = (KL, "actor/distillation/reverse_kl", "actor/entropy", "actor/grad_norm")
    accuracy = [row[ACCURACY] for row in run if ACCURACY in row][-1]
    return [100 * accuracy, *(sum(row.get(name, math.nan) for row in last) / len(last) for name in names)]


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
            cells.append("—" if mean == "nan" else mean if low == high else f"{mean} ({low} to {high})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_by_step(runs: list[Run], metric: str) -> list[tuple[float, float]]:
    """(step, mean over the runs) where all of them have the metric."""
    found: dict[float, list[float]] = {}
    for row in (row for run in runs for row in run if metric in row):
        found.setdefault(row["step"], []).append(row[metric])
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items()) if len(values) == len(runs)]


def plot(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """A Vega-Lite specification: divergence by step (mean of five) and accuracy by step, means over the seeds."""
    kl, accuracy = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, each in runs.items():
        values = mean_by_step(each, KL)
        windows = [values[max(0, i - 2) : i + 3] for i in range(len(values))]
        smooth = [sum(value for _, value in window) / len(window) for window in windows]
        kl += [{"run": name, "step": step, "value": y} for (step, _), y in zip(values, smooth, strict=True)]
        accuracy += [{"run": name, "step": step, "value": y} for step, y in mean_by_step(each, ACCURACY)]
    return panels(list(runs), kl, accuracy)


def panels(names: list[str], kl: list[dict[str, Any]], accuracy: list[dict[str, Any]]) -> dict[str, Any]:
    """Both curves side by side, from rows of `run`, `step`, `value`."""
    color = {
        "field": "run", "scale": {"domain": names, "range": COLORS[: len(names)]}, "sort": names,
        "legend": {"title": None, "symbolType": "stroke", "symbolStrokeWidth": 3},
    }  # fmt: skip

    def panel(title: str, rows: list[dict[str, Any]], axis: dict[str, Any], scale: dict[str, Any]) -> dict[str, Any]:
        y = {"field": "value", "type": "quantitative", "axis": {"title": None, **axis}, "scale": scale}
        x = {"field": "step", "type": "quantitative", "axis": {"grid": False}}
        return {
            "title": {"text": title, "anchor": "start"}, "width": 330, "height": 260, "data": {"values": rows},
            "mark": {"type": "line", "strokeWidth": 1.8, "clip": True}, "encoding": {"x": x, "y": y, "color": color},
        }  # fmt: skip

    log, whole = {"type": "log", "domain": [0.03, 3]}, {"domain": [0, 1]}
    return {
        "background": "white", "padding": 12, "spacing": 50, "config": {"view": {"stroke": None}},
        "hconcat": [
            panel("KL(teacher, student), nats per token", kl, {"values": [0.03, 0.1, 0.3, 1, 3]}, log),
            panel("accuracy on held-out prompts", accuracy, {"values": [0, 0.2, 0.4, 0.6, 0.8, 1]}, whole),
        ],
    }  # fmt: skip


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
    picture = plot({name: rows for name, rows in runs.items() if name in PLOTTED})
    (ROOT / "benchmarks" / "log" / "losses.svg").write_text(vl_convert.vegalite_to_svg(picture), encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()

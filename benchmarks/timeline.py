"""Draw steps of runs on one time axis, from their trace.json: docs/timeline.svg. Print what the runs came to.

    runs="python -m hybrid_gkd --config-name demo trainer.default_local_dir=outputs/timeline"
    $runs trainer.experiment_name=sync
    $runs trainer.experiment_name=one_step_off trainer.scheduler=one_step_off
    $runs trainer.experiment_name=two_step_off trainer.scheduler=two_step_off
    $runs trainer.experiment_name=separate_pools trainer.scheduler=one_step_off \\
        actor_rollout_ref.hybrid_engine=false rollout.n_gpus_per_node=1
    cd outputs/timeline/hybrid_gkd
    python ../../../benchmarks/timeline.py sync one_step_off two_step_off separate_pools

Several run folders are drawn below each other, each from the beginning of one of its steps. A step begins when the
trainer's span `gen` does; the steps drawn are the last but one and those before it, where everything is warm. The
table has the last held-out accuracy and KL, and medians of the steps, the first ten left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COLORS = {  # Okabe and Ito
    "gen": "#0072b2", "update_actor": "#d55e00", "wait_prev_teacher": "#dddddd", "wait_prev_gen": "#bbbbbb",
    "sync_rollout_weights": "#009e73", "request": "#cc79a7",
}
TIMES = ("step", "gen", "update_actor", "wait_prev_gen", "wait_prev_teacher", "sync_rollout_weights")
WARMUP_STEPS = 10
WIDTH, LEFT, ROW, LANE = 900, 120, 22, 14


def events_of(folder: Path) -> list[dict[str, Any]]:
    """All that the trace of a run folder holds."""
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())
    return events


def steps_of(events: list[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], float, float]:
    """The spans of `count` whole steps, with the time at which they begin and end, in microseconds."""
    starts = [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == 1 and e["name"] == "gen"]
    if len(starts) < count + 2:
        raise SystemExit(f"error: {count} steps can be drawn of a run of at least {count + 2}; this has {len(starts)}")
    begin, end = sorted(starts)[-count - 2], sorted(starts)[-2]
    drawn = [
        e for e in events
        if e["ph"] == "X" and e["name"] in COLORS and e["ts"] < end and e["ts"] + e["dur"] > begin
    ]
    return drawn, begin, end


def draw_run(folder: Path, count: int, top: int, scale: float) -> tuple[list[str], int]:
    """SVG of one run from `top` on, and where it ends. `scale`: pixels per microsecond."""
    events = events_of(folder)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    drawn, begin, end = steps_of(events, count)
    parts = [f'<text x="8" y="{top + 12}" font-weight="bold">{folder.name}</text>']
    y = top + 20
    for pid in sorted({e["pid"] for e in drawn}):
        lanes = sorted({e["tid"] for e in drawn if e["pid"] == pid})
        parts.append(f'<text x="8" y="{y + 11}">{names[pid]}</text>')
        for e in (e for e in drawn if e["pid"] == pid):
            left, right = max(e["ts"], begin), min(e["ts"] + e["dur"], end)
            parts.append(
                f'<rect x="{LEFT + scale * (left - begin):.1f}" y="{y + LANE * lanes.index(e["tid"])}" '
                f'width="{max(0.5, scale * (right - left)):.1f}" height="{LANE - 2}" fill="{COLORS[e["name"]]}"/>'
            )
        y += LANE * len(lanes) + ROW - LANE
    return parts, y + 8


def draw(folders: list[Path], count: int) -> str:
    """SVG of all runs at the scale of the longest, with an axis in milliseconds and the colours' names."""
    lengths = [end - begin for _, begin, end in (steps_of(events_of(f), count) for f in folders)]
    scale = (WIDTH - LEFT - 20) / max(lengths)
    parts, y = list[str](), 4
    for folder in folders:
        drawn, y = draw_run(folder, count, y, scale)
        parts += drawn
    tick = next(t for t in (10.0**p * f for p in range(1, 12) for f in (1, 2, 5)) if max(lengths) / t <= 10)
    for n in range(int(max(lengths) / tick) + 1):
        x = LEFT + scale * n * tick
        parts.append(f'<path d="M{x:.1f} {y}v5" stroke="black"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{n * tick / 1000:g}</text>')
    parts.append(f'<text x="{LEFT - 12}" y="{y + 18}" text-anchor="end">ms</text>')
    x = LEFT
    used = [name for name in COLORS if any(COLORS[name] in part for part in parts)]
    for name in used:
        parts.append(f'<rect x="{x}" y="{y + 30}" width="12" height="12" fill="{COLORS[name]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 40}">{name}</text>')
        x += 34 + 7 * len(name)
    height, body = y + 52, "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def table(folders: list[Path]) -> str:
    """Markdown, from metrics.jsonl: a row for each run."""
    lines = [
        f"| | steps | staleness | accuracy | `actor/kl_loss` | {' | '.join(f'`{name}`' for name in TIMES)} |",
        "|---" * (len(TIMES) + 5) + "|",
    ]
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows, accuracies = [r for r in rows if r["step"]], [r["val/accuracy"] for r in rows if "val/accuracy" in r]
        accuracy = f"{100 * accuracies[-1]:.1f} %" if accuracies else ""
        times = [statistics.median(r.get(f"timing/{name}", 0.0) for r in rows[WARMUP_STEPS:]) for name in TIMES]
        lines.append(
            f"| {folder.name} | {len(rows)} | {rows[-1]['training/staleness']:.0f} | {accuracy} | "
            f"{rows[-1]['actor/kl_loss']:.4f} | {' | '.join(f'{1000 * value:.0f} ms' for value in times)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--steps", type=int, default=3, help="steps to draw (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "timeline.svg", help="(%(default)s)")
    args = parser.parse_args()
    args.out.write_text(draw(args.folders, args.steps))
    print(table(args.folders))


if __name__ == "__main__":
    main()

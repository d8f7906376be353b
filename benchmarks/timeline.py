"""Draw steps of runs on one time axis, from their trace.json: docs/timeline.svg. Print the results of the runs.

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

import vl_convert
from common import ROOT

from hybrid_gkd.runtime.files import read_json_lines

COLORS = {  # Okabe and Ito
    "gen": "#0072b2", "update_actor": "#d55e00", "wait_prev_teacher": "#dddddd", "wait_prev_gen": "#bbbbbb",
    "sync_rollout_weights": "#009e73", "request": "#cc79a7",
}
TIMES = ("step", "gen", "update_actor", "wait_prev_gen", "wait_prev_teacher", "sync_rollout_weights")
WARMUP_STEPS = 10
WIDTH, LANE = 760, 14


def events_of(folder: Path) -> list[dict[str, Any]]:
    """All that the trace of a run folder holds."""
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
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


def rows_of(folder: Path, count: int) -> list[dict[str, Any]]:
    """The spans of some steps of a run with their row, in milliseconds after the beginning of the first step."""
    events = events_of(folder)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    drawn, begin, end = steps_of(events, count)
    lanes = {pid: sorted({e["tid"] for e in drawn if e["pid"] == pid}) for pid in sorted({e["pid"] for e in drawn})}
    return [
        {
            "who": names[e["pid"]], "row": f"{names[e['pid']]} {lane}", "name": e["name"],
            "start": (max(e["ts"], begin) - begin) / 1000, "end": (min(e["ts"] + e["dur"], end) - begin) / 1000,
        }
        for pid in lanes for lane, tid in enumerate(lanes[pid]) for e in drawn if (e["pid"], e["tid"]) == (pid, tid)
    ]  # fmt: skip


def picture(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A Vega-Lite specification of all runs, from their `rows_of`, on the time axis of the longest."""
    longest = max(row["end"] for rows in runs.values() for row in rows)
    used = [name for name in COLORS if any(row["name"] == name for rows in runs.values() for row in rows)]
    color = {
        "field": "name", "scale": {"domain": used, "range": [COLORS[name] for name in used]},
        "legend": {"title": None, "orient": "bottom", "columns": len(used), "labelLimit": 200, "columnPadding": 24},
    }  # fmt: skip

    def panel(title: str, rows: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
        order = list(dict.fromkeys(row["row"] for row in rows))
        # Rows of one participant are below each other; the first has the name.
        label = "slice(datum.value, -2) == ' 0' ? slice(datum.value, 0, -2) : ''"
        x = {
            "field": "start", "type": "quantitative", "scale": {"domain": [0, longest], "nice": False},
            "axis": {"title": "ms" if last else None, "labels": last, "ticks": last},
        }  # fmt: skip
        axis = {"title": None, "labelExpr": label, "ticks": False, "domain": False}
        y = {"field": "row", "sort": order, "axis": axis}
        return {
            "title": {"text": title, "anchor": "start"}, "width": WIDTH, "height": LANE * len(order),
            "data": {"values": rows}, "mark": {"type": "bar", "height": LANE - 2},
            "encoding": {"x": x, "x2": {"field": "end"}, "y": y, "color": color},
        }  # fmt: skip

    numbered = enumerate(runs.items(), start=1)
    return {
        "background": "white", "padding": 12, "config": {"view": {"stroke": None}},
        "vconcat": [panel(title, rows, last=number == len(runs)) for number, (title, rows) in numbered],
    }  # fmt: skip


def table(folders: list[Path]) -> str:
    """Markdown, from metrics.jsonl: a row for each run."""
    lines = [
        f"| | steps | staleness | accuracy | `actor/kl_loss` | {' | '.join(f'`{name}`' for name in TIMES)} |",
        "|---" * (len(TIMES) + 5) + "|",
    ]
    for folder in folders:
        rows = list(read_json_lines(folder / "metrics.jsonl"))
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
    runs = {folder.name: rows_of(folder, args.steps) for folder in args.folders}
    args.out.write_text(vl_convert.vegalite_to_svg(picture(runs)), encoding="utf-8")
    print(table(args.folders))


if __name__ == "__main__":
    main()

"""docs/results.md and its pictures from the runs that benchmarks/results.py has stored; trains nothing.

The runs of a task are in one folder: those of gpu_demo in benchmarks/results, those of other models in folders below.
Texts of the page are files beside the runs: the task with a heading (`about.md`), the conclusions on a regime
(`many.md`), and what comes last (`more.md`), which the page has also without runs.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = (
    "step", "minutes", "answer_tokens", "val/accuracy", "val/forward_kl", "val/reverse_kl", "val/response_length",
    "actor/loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "reward/mean", "response_length/mean",
    "training/staleness",
)  # fmt: skip
METHOD = """\
All runs of a table begin at the same student and lower their rate to 0 by a cosine: a run's end is its result.
Minutes are those of training steps, the writing of the teacher's completions included where a run reads them, without
loading, validation and saving. A cell is the mean of the seeds, and the lowest to the highest."""
SEARCH = "Ends of runs with one seed, the best first. The best setting of a method trains its seeds."
Row = dict[str, float]
AXES = {"minutes": ("minutes of training", 1.0), "answer_tokens": ("tokens of completions, millions", 1e-6)}


class Panel(NamedTuple):
    """Curves of a picture: a metric, in the unit of its label, over one of AXES."""

    axis: str
    metric: str
    label: str
    unit: float = 1.0
    scale: str = "linear"


PANELS = {
    "Accuracy": tuple(Panel(axis, "val/accuracy", "accuracy on held-out problems, %", 100) for axis in AXES),
    "Divergence": tuple(
        Panel(axis, "val/forward_kl", "held-out KL(teacher, student), nats/token", scale="log") for axis in AXES
    ),
}
"""Pictures by name, for runs with and without an accuracy."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored run."""

    head: dict[str, str]
    rows: list[Row]

    @property
    def name(self) -> str:
        return self.head["run"]

    @property
    def seed(self) -> int:
        return int(self.head["seed"])

    def points(self, axis: str, metric: str) -> list[tuple[float, float]]:
        """(minutes or tokens of completions, metric) where it was measured."""
        return [(row[axis], row[metric]) for row in self.rows if metric in row]

    @property
    def quality(self) -> float:
        """At the end, higher is better: accuracy, or without one minus the divergence from the teacher."""
        (found,) = self.last("val/accuracy") or [-each for each in self.last("val/forward_kl")]
        return found

    def last(self, metric: str) -> list[float]:
        """Return the last value of a metric, or nothing where it was never measured."""
        return [row[metric] for row in self.rows if metric in row][-1:]

    def end(self, axis: str) -> float:
        """Where the last validation was."""
        return [row[axis] for row in self.rows if is_validation(row)][-1]


def is_validation(row: Mapping[str, float]) -> bool:
    """Whether held-out prompts were answered then."""
    return any(name.startswith("val/") for name in row)


def read_all(folder: Path) -> list[Stored]:
    """All runs of a folder. Raises SystemExit for a file that is none."""
    return [read(file) for file in sorted(folder.glob("*.csv"))]


def read(file: Path) -> Stored:
    """One run. Raises SystemExit for a file that is none."""
    lines = file.read_text(encoding="utf-8").splitlines()
    head = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    table = csv.DictReader([line for line in lines if not line.startswith("# ")])
    rows = [{key: float(value) for key, value in row.items() if value} for row in table]
    if not {"run", "seed", "models", "device"} <= head.keys() or not any(map(is_validation, rows)):
        raise SystemExit(f"{file} is no stored run: it needs `# run`, `# seed`, `# models`, `# device` and validations")
    return Stored(head, rows)


def spread(values: list[float], digits: int = 1) -> str:
    """Mean, and lowest to highest where there are several values; empty without any."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(runs: dict[str, list[Stored]], titles: dict[str, str]) -> str:
    """Markdown: the end of each run, without columns that are empty."""
    groups = list(runs.values())
    columns = {
        "method": [titles[name] for name in runs],
        "seeds": [str(len(each)) for each in groups],
        "accuracy, %": [spread([100 * end for run in each for end in run.last("val/accuracy")]) for each in groups],
        "KL(teacher, student), nats/token": [
            spread([end for run in each for end in run.last("val/forward_kl")], 4) for each in groups
        ],
        "minutes": [spread([run.end("minutes") for run in each], 2) for each in groups],
        "tokens, M": [spread([run.end("answer_tokens") / 1e6 for run in each], 2) for each in groups],
        "setting": [" or ".join(dict.fromkeys(run.head["setting"] for run in each)) for each in groups],
    }
    kept = {label: cells for label, cells in columns.items() if any(cells)}
    head, *lines = (f"| {' | '.join(row)} |" for row in (kept, *zip(*kept.values(), strict=True)))
    return "\n".join([head, "|---" * len(kept) + "|", *lines])


def search_table(runs: dict[str, list[Stored]], titles: dict[str, str]) -> str:
    """Markdown: the end of the runs of the search, the best first."""
    accuracy = has_accuracy(run for each in runs.values() for run in each)
    measure = "accuracy, %" if accuracy else "KL(teacher, student), nats/token"
    lines = [f"| method | steps | setting: {measure} |", "|---|---|---|"]
    for name, each in runs.items():
        steps = " or ".join(f"{end:g}" for end in sorted({run.end("step") for run in each}))
        ends = [(run.head["setting"], run.quality) for run in sorted(each, key=lambda run: -run.quality)]
        cells = [f"{setting}: {100 * end:.1f}" if accuracy else f"{setting}: {-end:.4f}" for setting, end in ends]
        lines.append(f"| {titles[name]} | {steps} | {'; '.join(cells)} |")
    return "\n".join(lines)


def has_accuracy(found: Iterable[Stored]) -> bool:
    """Return whether runs count right completions; without rewards they measure the divergence alone."""
    return any(run.last("val/accuracy") for run in found)


def means(curves: list[list[tuple[float, float]]]) -> list[tuple[float, dict[str, float]]]:
    """Mean, lowest and highest value of each validation, where the seeds were then on the mean."""
    found = []
    for points in zip(*curves, strict=False):  # stored runs may differ in length
        places, values = zip(*points, strict=True)
        bounds = {"mean": statistics.mean(values), "lowest": min(values), "highest": max(values)}
        found.append((statistics.mean(places), bounds))
    return found


def chart(runs: dict[str, list[Stored]], titles: dict[str, str], panels: Sequence[Panel]) -> dict[str, Any]:
    """A Vega-Lite specification: the panels side by side, the mean of the seeds between the lowest and the highest."""
    drawn = []
    for panel in panels:
        label, unit = AXES[panel.axis]
        curves = {name: [run.points(panel.axis, panel.metric) for run in each] for name, each in runs.items()}
        ends = [points[-1][0] for each in curves.values() for points in each]
        scale = {"domainMin": 0, "domainMax": unit * max(ends)}
        x = {"field": "x", "type": "quantitative", "title": label, "scale": scale}
        order = [titles[name] for name in runs]
        color = {"field": "run", "type": "nominal", "title": None, "sort": order, "legend": {"symbolOpacity": 1}}
        y = {"type": "quantitative", "title": panel.label, "scale": {"type": panel.scale, "nice": panel.scale != "log"}}
        band = {"y": y | {"field": "lowest"}, "y2": {"field": "highest"}}
        drawn.append({
            "data": {"values": [
                {"x": at * unit, "run": titles[name]} | {key: value * panel.unit for key, value in found.items()}
                for name, each in curves.items() for at, found in means(each)
            ]},
            "width": 360, "height": 280, "encoding": {"x": x, "color": color},
            "layer": [
                {"mark": {"type": "area", "opacity": 0.15, "clip": True}, "encoding": band},
                {
                    "mark": {"type": "line", "point": {"size": 14}, "strokeWidth": 1.4, "clip": True},
                    "encoding": {"y": y | {"field": "mean"}},
                },
            ],
        })  # fmt: skip
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json", "background": "white", "hconcat": drawn,
        "padding": {"left": 5, "top": 5, "bottom": 5, "right": 90},  # the legend, where letters are wider than here
        "config": {"range": {"category": {"scheme": "tableau10"}}},
    }  # fmt: skip


def draw(specification: dict[str, Any], file: Path) -> None:
    """Write an SVG. Raises SystemExit without the package that draws."""
    try:
        import vl_convert
    except ImportError as error:
        raise SystemExit("the pictures need vl-convert-python: bash run_gkd.sh --install-only dev") from error
    file.write_text(vl_convert.vegalite_to_svg(specification), encoding="utf-8")


def facts(runs: list[Stored]) -> str:
    """Describe what the runs have in common. Raises SystemExit for runs of several models or devices."""
    for key in ("models", "device"):
        if len(found := sorted({run.head.get(key, "1") for run in runs})) > 1:
            raise SystemExit(f"runs with several {key} cannot be compared: {', '.join(found)}")
    dates, codes = (sorted({run.head[key] for run in runs}) for key in ("date", "code"))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    numbers = sorted({int(run.head.get("together", "1")) for run in runs})
    number = " or ".join(map(str, numbers))
    together = "" if number == "1" else f", {number} runs at a time on each"
    models = [f"{name} {runs[0].head[name]}; " for name in ("teacher", "student") if name in runs[0].head]
    return (
        f"{when}, {runs[0].head['device']}{together}; {''.join(models)}models {runs[0].head['models']}; "
        f"code {', '.join(codes)}."
    )


def by_name(found: list[Stored], titles: dict[str, str]) -> dict[str, list[Stored]]:
    """The runs in the order of their titles. Raises SystemExit for runs without a title."""
    if unknown := sorted({run.name for run in found} - titles.keys()):
        raise SystemExit(f"stored runs that the list does not have: {', '.join(unknown)}")
    return {name: each for name in titles if (each := [run for run in found if run.name == name])}


def report(root: Path, regimes: dict[str, tuple[str, dict[str, str]]], docs: Path) -> None:
    """Write docs/results.md and a picture for each regime: its title, and the titles of its methods by run.

    Raises SystemExit where there is nothing to show or nothing to compare.
    """
    folders = [root, *sorted(each for each in root.glob("*") if each.is_dir() and each.name != "search")]
    runs = {folder: found for folder in folders if (found := read_all(folder))}
    if not runs:
        raise SystemExit("no runs are stored: the same command with run makes them")
    parts = ["# Results", METHOD]
    for folder, found in runs.items():
        parts += section(folder, found, regimes, docs, pictures=["results", *folder.relative_to(root).parts])
    for folder in folders:
        parts += words(folder / "more.md")
    parts.append("This page is generated: `python benchmarks/results.py report`, from `benchmarks/results/`.")
    (docs / "results.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(docs / "results.md")


def section(
    folder: Path, found: list[Stored], regimes: dict[str, tuple[str, dict[str, str]]], docs: Path, pictures: list[str]
) -> list[str]:
    """Return the page's paragraphs on the runs of one folder, and draw their pictures, whose names begin with these."""
    names = {name: title for _, titles in regimes.values() for name, title in titles.items()}
    runs, searched = by_name(found, names), by_name(read_all(folder / "search"), names)
    parts, search = [*words(folder / "about.md"), facts(found)], ["# Search", SEARCH]
    for regime, (title, titles) in regimes.items():
        if some := {name: runs[name] for name in titles if name in runs}:
            picture = "Accuracy" if has_accuracy(run for each in some.values() for run in each) else "Divergence"
            file = docs / ("_".join(dict.fromkeys([*pictures, regime])) + ".svg")
            draw(chart(some, titles, PANELS[picture]), file)
            parts += [f"### {title}", *words(folder / f"{regime}.md")]
            parts += [f"![{picture} by minutes and by tokens]({file.name})", table(some, titles)]
        if some := {name: searched[name] for name in titles if name in searched}:
            search += [f"## {title}", search_table(some, titles)]
    if searched:
        page = folder / "search" / "README.md"
        page.write_text("\n\n".join(search) + "\n", encoding="utf-8")
        link = os.path.relpath(page, docs)
        parts.append(f"Settings are the best of a [search]({link}) with one seed; others were not searched.")
    return parts


def words(file: Path) -> list[str]:
    """Return the text of a file beside the runs, if it is there."""
    return [file.read_text(encoding="utf-8").strip()] if file.exists() else []

"""Final table of a run: results of the student, and locations of its files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hybrid_gkd.config import Config
from hybrid_gkd.config.flat import flat
from hybrid_gkd.reporting.metric_table import data_source_of, held_out_reward

VALIDATED = ("val/reward_model", "val/forward_kl", "val/reverse_kl")
"""Metrics of validation that are shown besides the accuracy."""


def final_table(
    config: Config, *, steps: int, wall_seconds: float, first: Mapping[str, float], last: Mapping[str, float],
    teacher_accuracy: float | None = None, best: tuple[float, int, Path] | None = None, checkpoint: Path | None = None,
    huggingface: Path | None = None, metrics: Path | None = None, report: Path | None = None,
    config_file: Path | None = None, resumed: bool = False,
) -> str:
    """Return the table as plain text, one line per fact, without a trailing newline.

    Results that the run has not computed are omitted; other unknown facts are a dash.

    Args:
        steps: completed training steps, including those before a resume.
        first: metrics of the validation before training and of the first step, as far as known.
        last: metrics of the last step and of the validation after it.
        teacher_accuracy: from 0 to 1, on the validation prompts.
        best: value, step and checkpoint of the best validation by `trainer.best_metric`.
        checkpoint, huggingface, metrics, report, config_file: paths; `report` is absolute.
        resumed: whether the run was resumed; `wall_seconds` covers this start only.
    """
    minutes, seconds = divmod(round(wall_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    wall_time = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    if config.trainer.val_only:
        known = {"held-out accuracy: teacher": teacher_accuracy} if teacher_accuracy is not None else {}
        results = [(name, show(value, ".5g")) for name, value in (known | {**last}).items()]
        validated = config.actor_rollout_ref.model.path if checkpoint is None else str(checkpoint)
        results = [("validated, not trained (trainer.val_only)", validated), *results]
    else:
        results = _results(config, first, last, teacher_accuracy)
    rows = [
        *results,
        ("training steps", str(steps)),
        ("wall time of this start" if resumed else "wall time", wall_time),
        ("checkpoint", show(checkpoint)),
        ("Hugging Face folder", show(huggingface)),
        *_best(config, best),
        ("metrics", show(metrics)),
        *([] if config.trainer.val_only else [("report, to open in a browser", show(report and report.as_uri()))]),
        ("resolved configuration", show(config_file)),
    ]
    label_width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{label_width}}  {value}" for label, value in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, *lines, rule])


def comparison(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table with one line of metrics per model, as plain text without a trailing newline.

    With several data sources, one line per source follows. Metrics by quarter are omitted.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for model, metrics in rows.items():
        for name, value in metrics.items():
            group, short = data_source_of(name)
            if re.search(r"/q\d$", short) is None:
                found.setdefault((model, group), {})[short] = value
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    lines = [["model", "data source", *names]]
    for (model, group), metrics in found.items():
        lines.append([model, group or "all", *(show(metrics.get(name), ".5g") for name in names)])
    if not any(group for _, group in found):
        lines = [[line[0], *line[2:]] for line in lines]
    labels = len(lines[0]) - len(names)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([
            *map(str.ljust, line[:labels], widths), *map(str.rjust, line[labels:], widths[labels:])
        ]).rstrip()
        for line in lines
    )  # fmt: skip


def _best(config: Config, best: tuple[float, int, Path] | None) -> list[tuple[str, str]]:
    if config.trainer.best_metric is None or config.trainer.val_only:
        return []
    value = show(None) if best is None else "{:.4f} after step {}: {}".format(*best)
    return [(f"best checkpoint by {config.trainer.best_metric}", value)]


def _results(
    config: Config, first: Mapping[str, float], last: Mapping[str, float], teacher_accuracy: float | None
) -> list[tuple[str, str]]:
    """Return the lines with the student's results, as far as the run has computed them."""
    name, form = held_out_reward(flat(asdict(config)))
    accuracy = {"teacher": teacher_accuracy if config.distillation.enabled else None}
    accuracy |= {"student before": first.get("val/accuracy"), "student after": last.get("val/accuracy")}
    rows = [(f"held-out {name}: {who}", show(value, form)) for who, value in accuracy.items() if value is not None]
    reward = "reward/all_groups" if config.algorithm.filter_groups.enable else "reward/mean"
    trained = ["actor/kl_loss"] * config.distillation.enabled + [reward] * config.trains_on_rewards
    changes = {"before and after": VALIDATED, "first and last step": trained}
    return rows + [
        (f"{name}, {when}", f"{show(first.get(name), '.4f')} -> {show(last.get(name), '.4f')}")
        for when, names in changes.items() for name in names if name in first or name in last
    ]


def show(value: float | Path | str | None, form: str = "") -> str:
    """Format a value; unknown ones are a dash."""
    return "—" if value is None else format(value, form)

"""Summary cards of a report: results, time and tokens, and the cost of a resume."""

from __future__ import annotations

from typing import Any

from hybrid_gkd.reporting.final_table import show
from hybrid_gkd.reporting.metric_table import held_out_reward
from hybrid_gkd.reporting.report.run_folder import RunFolder

Card = dict[str, Any]
"""Keys `label`, `value`, optionally `note` and `change` (better or worse)."""


def headline(run: RunFolder, config: dict[str, Any], state: dict[str, Any]) -> list[Card]:
    """Return the cards of a run, for what its configuration measures; unknown values are a dash."""
    teacher = run.starts[-1].get("teacher_accuracy") if run.starts else None
    cards = []
    scores = bool(config.get("reward_model.enable"))
    if scores and config.get("data.val_files"):
        cards.append(_validated(run, "val/reward_model", "Held-out score", ".3f", "of the reward model", rises=True))
    has_functions = "val/accuracy" in run.last or (not scores and config.get("reward.answer_key") is not None)
    if has_functions and config.get("data.val_files"):
        name, form = held_out_reward(config)
        note = f"teacher {teacher:{form}}" if teacher is not None else ""
        cards.append(_validated(run, "val/accuracy", f"Held-out {name}", form, note, rises=True))
    if config.get("distillation.enabled", True):
        if "val/forward_kl" in run.last:
            note = f"reverse {show(run.last.get('val/reverse_kl'), '.4f')}, nats/token"
            cards.append(_validated(run, "val/forward_kl", "Held-out KL", ".4f", note, rises=False))
        else:
            cards.append(_trained(run, "actor/kl_loss", "KL to the teacher", ".4f", "nats/token", rises=False))
    if "reward/mean" in run.last:
        filtered = "reward/all_groups" in run.last
        name, note = ("reward/all_groups", "all groups") if filtered else ("reward/mean", "completions trained on")
        cards.append(_trained(run, name, "Mean reward", ".3f", note, rises=True))
    if "actor/sft_loss" in run.last:
        cards.append(_trained(run, "actor/sft_loss", "SFT cross-entropy", ".4f", "nats/token", rises=False))
    elapsed = run.last.get("timing/elapsed")
    starts = f"in {state['starts']} starts" if state["starts"] > 1 else ""
    loading = sum(start["ready"] - start["start"] for start in run.starts if "ready" in start)
    cards += [
        {"label": "Steps", "value": f"{state['step']}" + (f" of {state['total']}" if state["total"] else ""),
         "note": _listed(_remaining_time(run, state), starts)},
        {"label": "Training time", "value": duration(elapsed),
         "note": f"plus {duration(loading)} of loading" if loading else ""},
        {"label": "Tokens", "value": _short(run.tokens),
         "note": "prompts and completions" + (f", {_short(run.tokens / elapsed)}/s" if elapsed else "")},
        _cost_to_resume(run, config, state, elapsed),
    ]  # fmt: skip
    return cards


def _cost_to_resume(run: RunFolder, config: dict[str, Any], state: dict[str, Any], elapsed: float | None) -> Card:
    """Return the card of the cost of a resume: steps since the last checkpoint, and loading."""
    label, saved = "Cost to resume", run.checkpoint_step()
    if state["outcome"] == "finished":
        return {"label": label, "value": "finished", "note": f"global_step_{saved}" if saved is not None else ""}
    ready = [start["ready"] - start["start"] for start in run.starts if "ready" in start]
    loading = f"{duration(ready[-1])} of loading" if ready else ""
    lost = run.step - (saved or 0)
    where = f"from global_step_{saved}" if saved is not None else "no checkpoint"
    training = f"{duration(elapsed * lost / run.step)} of repeated training" if elapsed and run.step and lost else ""
    with_key = "with trainer.resume_mode=auto" if config.get("trainer.resume_mode") == "disable" else ""
    note = _listed(with_key, where, training, loading)
    again = f"repeat {lost} step{'s' if lost != 1 else ''}" if run.step else "from the start"
    return {"label": label, "value": again, "note": note}


def _remaining_time(run: RunFolder, state: dict[str, Any]) -> str:
    """Return the estimated remaining time, at the pace of the newest start; "" unless the run is active."""
    left = (state["total"] or 0) - run.step
    if state["outcome"] != "running" or left <= 0:
        return ""
    begun = run.starts[-1].get("step", 0)
    clock = [(point.step, point.high) for point in run.points("timing/elapsed")]
    step, elapsed = max((each for each in clock if each[0] <= begun), default=(begun, 0.0))
    if not clock or clock[-1][0] <= step:
        return ""
    pace = (clock[-1][1] - elapsed) / (clock[-1][0] - step)
    return f"about {duration(pace * left)} left"


def _validated(run: RunFolder, name: str, label: str, form: str, note: str, *, rises: bool) -> Card:
    """Return the card of a validation metric: first (if not the only one), last and best value."""
    points, best, began = run.points(name), "", ""
    if points:
        began = f"first at step {points[0].step}" if points[0].step and points[0].rows == 1 else ""
        peak = max(points, key=lambda point: point.high) if rises else min(points, key=lambda point: point.low)
        value = peak.high if rises else peak.low
        if value != run.last[name]:
            best = f"best {value:{form}} {'at' if peak.rows == 1 else 'by'} step {peak.step}"
    before = run.first.get(name) if len(points) > 1 else None
    return _change(before, run.last.get(name), label, form, _listed(began, best, note), rises=rises)


def _trained(run: RunFolder, name: str, label: str, form: str, note: str, *, rises: bool) -> Card:
    """Return the card of a training metric: means over the first and last tenth of the steps, to reduce noise."""
    points = run.points(name)
    tenth = max(1, len(points) // 10)
    parts = [part for part in (points[:tenth], points[-tenth:]) if part]
    ends = [sum(point.total for point in part) / sum(point.rows for point in part) for part in parts]
    if tenth > 1:
        note = f"first and last tenth, {note}"
    before, after = ends or (None, None)
    return _change(before if len(points) > 1 else None, after, label, form, note, rises=rises)


def _change(before: float | None, after: float | None, label: str, form: str, note: str, *, rises: bool) -> Card:
    card: Card = {"label": label, "value": f"{show(before, form)} → {show(after, form)}", "note": note}
    if before is not None and after is not None and before != after:
        card["change"] = "better" if (after > before) == rises else "worse"
    return card


def _listed(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _short(value: float) -> str:
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Format seconds as 1:02:03, 2:03 or, below a minute, 12 s."""
    if seconds is None:
        return "—"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""The table that a run prints at its end: did the student get better, and where is everything."""

from __future__ import annotations

from pathlib import Path


def final_table(
    *, steps: int, wall_seconds: float, teacher_accuracy: float | None = None,
    student_accuracy_before: float | None = None, student_accuracy_after: float | None = None,
    kl_first: float | None = None, kl_last: float | None = None, checkpoint: Path | None = None,
    huggingface: Path | None = None, metrics: Path | None = None, config: Path | None = None,
) -> str:
    """Plain text, one line per fact, without a newline at the end. Accuracies are from 0 to 1, None is unknown."""
    minutes, seconds = divmod(round(wall_seconds), 60)
    hours, minutes = divmod(minutes, 60)
    rows = [
        ("held-out accuracy: teacher", _show(teacher_accuracy, ".1%")),
        ("held-out accuracy: student before", _show(student_accuracy_before, ".1%")),
        ("held-out accuracy: student after", _show(student_accuracy_after, ".1%")),
        ("actor/kl_loss, first and last step", f"{_show(kl_first, '.4f')} -> {_show(kl_last, '.4f')}"),
        ("training steps", str(steps)),
        ("wall time", f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"),
        ("checkpoint", _show(checkpoint)),
        ("Hugging Face folder", _show(huggingface)),
        ("metrics", _show(metrics)),
        ("resolved configuration", _show(config)),
    ]
    label_width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{label_width}}  {value}" for label, value in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, *lines, rule])


def _show(value: float | Path | None, form: str = "") -> str:
    return "—" if value is None else format(value, form)

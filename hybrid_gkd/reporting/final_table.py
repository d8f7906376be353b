"""The table that a run prints at its end: did the student get better, and where is everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Results of a finished run. None where a number or a file does not exist."""

    steps: int
    """Training steps done, those before a resume included."""
    wall_seconds: float
    """Time since this process started."""
    teacher_accuracy: float | None = None
    """Held-out prompts answered correctly, from 0 to 1."""
    student_accuracy_before: float | None = None
    student_accuracy_after: float | None = None
    kl_first: float | None = None
    """actor/kl_loss of the first step."""
    kl_last: float | None = None
    checkpoint: Path | None = None
    huggingface: Path | None = None
    """Folder that transformers and vLLM load the student from."""
    metrics: Path | None = None
    config: Path | None = None


def final_table(summary: RunSummary) -> str:
    """The summary as plain text, one line per fact, without a newline at the end."""
    rows = [
        ("held-out accuracy: teacher", _show(summary.teacher_accuracy, ".1%")),
        ("held-out accuracy: student before", _show(summary.student_accuracy_before, ".1%")),
        ("held-out accuracy: student after", _show(summary.student_accuracy_after, ".1%")),
        ("actor/kl_loss, first and last step", f"{_show(summary.kl_first, '.4f')} -> {_show(summary.kl_last, '.4f')}"),
        ("training steps", str(summary.steps)),
        ("wall time", _duration(summary.wall_seconds)),
        ("checkpoint", _show(summary.checkpoint)),
        ("Hugging Face folder", _show(summary.huggingface)),
        ("metrics", _show(summary.metrics)),
        ("resolved configuration", _show(summary.config)),
    ]
    label_width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{label_width}}  {value}" for label, value in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, *lines, rule])


def _show(value: float | Path | None, form: str = "") -> str:
    return "—" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

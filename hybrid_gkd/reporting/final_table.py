"""The table that a run prints at its end: did the student get better, and where is everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a finished run has to show. None where a number or a file does not exist."""

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
        ("held-out accuracy: teacher", _percent(summary.teacher_accuracy)),
        ("held-out accuracy: student before", _percent(summary.student_accuracy_before)),
        ("held-out accuracy: student after", _percent(summary.student_accuracy_after)),
        ("actor/kl_loss, first and last step", f"{_number(summary.kl_first)} -> {_number(summary.kl_last)}"),
        ("training steps", str(summary.steps)),
        ("wall time", _duration(summary.wall_seconds)),
        ("checkpoint", _path(summary.checkpoint)),
        ("Hugging Face folder", _path(summary.huggingface)),
        ("metrics", _path(summary.metrics)),
        ("resolved configuration", _path(summary.config)),
    ]
    label_width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{label_width}}  {value}" for label, value in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, *lines, rule])


def _percent(fraction: float | None) -> str:
    return "—" if fraction is None else f"{fraction:.1%}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.4f}"


def _path(path: Path | None) -> str:
    return "—" if path is None else str(path)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

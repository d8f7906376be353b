"""What a person at a terminal sees beside the log: the plan before a run, and what to do after it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from hybrid_gkd.offload.residency import MEMORY_OWNERS


def show_plan(stream: TextIO, lines: list[str], phases: Mapping[str, Mapping[str, float]]) -> None:
    """Draw who is where, and what each worker's memory holds by phase.

    Args:
        lines: `what: where and how`, a fact each.
        phases: phase -> owner -> bytes.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=stream)
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for line in lines:
        what, _, text = line.partition(": ")
        facts.add_row(f"[bold]{what}[/bold]", escape(text))
    owners = list(dict.fromkeys(name for held in phases.values() for name in held))
    owners.sort(key=lambda name: (*MEMORY_OWNERS, name).index(name))
    unit, size = ("GiB", 2**30) if max(sum(held.values()) for held in phases.values()) > 2**27 else ("MiB", 2**20)
    title = f"memory of each worker by phase, {unit} (activations: at least)"
    memory = Table(title=title, title_justify="left", title_style="bold")
    memory.add_column("phase")
    for name in [*owners, "together"]:
        memory.add_column(name.replace("_", " "), justify="right")
    for phase, held in phases.items():
        cells = [f"{held[name] / size:.1f}" if held.get(name) else "" for name in owners]
        memory.add_row(phase.replace("_", " "), *cells, f"{sum(held.values()) / size:.1f}")
    console.print(facts)
    console.print(memory)


def show_next_steps(
    stream: TextIO, *, report: Path | None, huggingface: Path | None, base: str, train_on: list[str], run_dir: Path
) -> None:
    """Say how to look at the run, serve the student and train on; paths are links where the terminal has them.

    Args:
        report, huggingface: the run's page and the student in Hugging Face format, where they are.
        base: the model that the student began as, which adapters in `huggingface` need.
        train_on: what the command of this run needs beside it to train further.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=stream, soft_wrap=True, highlight=False)
    if report is not None:
        console.print(f"open the report: [link={report.as_uri()}]{escape(str(report))}[/link]")
    if huggingface is not None:
        folder = str(huggingface)
        served = [folder]
        if (huggingface / "adapter_config.json").is_file():
            served = [base, "--enable-lora", "--lora-modules", f"student={folder}"]
        console.print(f"serve the student: vllm serve {escape(shlex.join(served))}")
    console.print(f"train on: the same command with {escape(' '.join(train_on))}; run folder: {escape(str(run_dir))}")

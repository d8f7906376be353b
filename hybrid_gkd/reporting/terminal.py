"""Terminal output besides the log: the plan before a run, and the next steps after it."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from hybrid_gkd.compat.vllm.versions import LORA_RANKS
from hybrid_gkd.offload.residency import MEMORY_OWNERS


def show_plan(
    stream: TextIO, lines: list[str], phases: Mapping[str, Mapping[str, float]], *, card_bytes: int | None = None
) -> None:
    """Print the placement, and the memory of each worker by phase.

    Args:
        lines: facts in the form `label: text`.
        phases: phase -> owner -> bytes.
        card_bytes: total memory of a worker's GPU, if known.
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
    if card_bytes is not None:
        title += f", of {card_bytes / 2**30:.1f} GiB on the card"
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
    stream: TextIO, *, report: Path | None, huggingface: Path | None, base: str, on_gpu: bool, train_on: list[str],
    run_dir: Path,
) -> None:
    """Print how to view the run, serve the student and continue training; paths are links if supported.

    Args:
        report, huggingface: the report, and the folder with the student in Hugging Face format, if any.
        base: the initial model of the student, required by adapters in `huggingface`.
        on_gpu: whether this machine has a GPU for serving.
        train_on: additional arguments that make this run's command continue training.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=stream, soft_wrap=True, highlight=False)
    if report is not None:
        console.print(f"open the report: [link={report.as_uri()}]{escape(str(report))}[/link]")
    if huggingface is not None and importlib.util.find_spec("vllm") is not None:
        command = serving_command(huggingface, base, on_gpu=on_gpu)
        console.print(f"serve the student: {escape(shlex.join(command))}")
    more, folder = escape(" ".join(train_on)), escape(str(run_dir))
    console.print(f"train further: the same command with {more}; run folder: {folder}")


def serving_command(huggingface: Path, base: str, *, on_gpu: bool) -> list[str]:
    """Return the command of vLLM's server for the student, with this interpreter and on this machine only.

    It does not use `vllm serve`, which needs an activated environment and does not start in the CPU build.
    """
    served, adapters = ["--model", str(huggingface)], huggingface / "adapter_config.json"
    if adapters.is_file():
        served = ["--model", base, "--enable-lora", "--lora-modules", f"student={huggingface}"]
        rank = json.loads(adapters.read_text(encoding="utf-8"))["r"]
        if rank > LORA_RANKS[0]:
            served += ["--max-lora-rank", str(next((limit for limit in LORA_RANKS if limit >= rank), rank))]
    if not on_gpu:  # here it is a fraction of the host's memory, which must be free; the default is 0.92
        served += ["--gpu-memory-utilization", "0.5"]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    return [*server, *served]

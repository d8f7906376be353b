"""Timeline of a representative step."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_gkd.reporting.report.growing_file import last_rows
from hybrid_gkd.runtime.spans import SUFFIX, TRAINER, Span

READ_BYTES = 256 * 2**10
"""Bytes read from the end of each span file: some hundred steps."""
MAX_WORKERS = 16
"""Maximum number of workers drawn."""
NOT_IN_EVERY_STEP = ("testing", "save_checkpoint", "initialize")


def representative_step(run_dir: Path, starts: Sequence[tuple[float, int]] = ()) -> dict[str, Any] | None:
    """Return a step of median length among the last ones, with spans in seconds from its start; None if there is none.

    A step lasts from the trainer's first span after the previous update to that of the next step. Concurrent spans of
    other steps are included. Steps with a validation or a checkpoint do not count.

    `starts`: time and completed steps of each start and restart, which repeats the later steps of those before it.
    """
    files = sorted((run_dir / "logs").glob(f"*{SUFFIX}"))
    files = [file for file in files if not file.name.endswith(f".old{SUFFIX}")]
    rows = (row for file in files for row in last_rows(file, READ_BYTES))
    spans = [Span(*row) for row in rows if isinstance(row, list) and not isinstance(row[-1], dict)]
    spans = [s for s in spans if not any(s.start < time and (s.step or 0) > step for time, step in starts)]
    begins: dict[int, float] = {}
    unusual = set()
    for span in spans:
        if span.row != TRAINER or span.step is None:
            continue
        if span.name in NOT_IN_EVERY_STEP:
            unusual.add(span.step)
        elif span.name == "update_actor":  # the one span that every scheduler has in every step
            begins[span.step] = min(begins.get(span.step, span.start), span.start)
    steps = sorted(begins)
    first = {step: _first_start(spans, step, begins) for step in steps}
    lengths = {
        step: first[after] - first[step]
        for step, after in itertools.pairwise(steps) if after == step + 1 and step not in unusual
        and not any(first[step] < time < first[after] for time, _ in starts)
    }  # fmt: skip
    oldest = min(steps, default=0)
    lengths.pop(oldest, None)  # may have started before the bytes read
    if not lengths:
        return None
    median = statistics.median_low(lengths.values())
    step = next(step for step in sorted(lengths, reverse=True) if lengths[step] == median)
    return _step_timeline(spans, step, first[step], first[step] + median)


def _first_start(spans: list[Span], step: int, updates: dict[int, float]) -> float:
    """Return the time of the trainer's first span of a step: its generation, unless prefetched, or its update."""
    before = updates.get(step - 1, float("-inf"))
    own = [s.start for s in spans if s.row == TRAINER and s.step == step and s.start > before and s.lane == 0]
    return min(own, default=updates[step])


def _step_timeline(spans: list[Span], step: int, begin: float, end: float) -> dict[str, Any]:
    drawn: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.start < end and span.end > begin:
            drawn[span.row].append(span)
    workers = sorted((row for row in drawn if row not in (TRAINER, "teacher")), key=_by_number)
    names = [name for name in (TRAINER, "teacher") if name in drawn] + workers[:MAX_WORKERS]
    rows = []
    for name in names:
        lanes = sorted({span.lane for span in drawn[name]})
        rows += [
            [name, lanes.index(s.lane), s.name, round(max(s.start, begin) - begin, 5),
             round(min(s.end, end) - begin, 5), s.step]
            for s in sorted(drawn[name], key=lambda span: span.start)
        ]  # fmt: skip
    return {"step": step, "seconds": round(end - begin, 5), "spans": rows, "left_out": len(workers[MAX_WORKERS:])}


def _by_number(row: str) -> tuple[str, int]:
    role, _, rank = row.rpartition(" ")
    return role, int(rank) if rank.isdigit() else 0

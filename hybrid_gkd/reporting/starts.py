"""starts.jsonl in the run folder: each start of a run with its ready time, end and error, and its restarts."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybrid_gkd.runtime.files import JsonLinesFile, read_json_lines

logger = logging.getLogger(__name__)

STARTS = "starts.jsonl"


def append_row(run_dir: Path, row: dict[str, Any]) -> None:
    """Append a row; a disk error is logged as a warning and does not fail the run."""
    try:
        with contextlib.closing(JsonLinesFile(run_dir / STARTS)) as file:
            file.append([row])
    except OSError as error:
        logger.warning("cannot write %s, the run continues without its rows: %s", STARTS, error)


def rows_of_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of starts.jsonl; none without the file."""
    file = run_dir / STARTS
    return [row for row in read_json_lines(file) if isinstance(row, dict)] if file.is_file() else []


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the starts with the fields of all of their rows."""
    starts: list[dict[str, Any]] = []
    for row in rows_of_starts(run_dir):
        if "start" in row:
            starts.append(row)
        elif starts and "restart" not in row:
            starts[-1] |= row
    return starts


def lost_work(run_dir: Path, saved: int) -> dict[str, float]:
    """Return the reported steps, and their training seconds, since step `saved`, which a restart from it repeats."""
    file = run_dir / "metrics.jsonl"
    rows = read_json_lines(file) if file.is_file() else ()
    elapsed = {int(row["step"]): row.get("timing/elapsed", 0.0) for row in rows}
    last = max(elapsed, default=0)
    seconds = elapsed.get(last, 0.0) - max((elapsed[step] for step in elapsed if step <= saved), default=0.0)
    return {"steps_repeated": max(0, last - saved), "seconds_repeated": max(0.0, seconds)}


def reliability(run_dir: Path) -> dict[str, float]:
    """Return the metrics `reliability/*` of a run that was restarted, by itself or by a supervisor; {} for others.

    Call it when the present start is ready. Lost seconds are those of repeated steps, and from each end until the next
    start was ready.
    """
    restarts, steps, seconds = 0, 0.0, 0.0
    ended = pending = None
    for row in rows_of_starts(run_dir):
        ended = row.get("end", ended)
        if "restart" in row:
            restarts, steps = restarts + 1, steps + row["steps_repeated"]
            seconds += row["seconds_repeated"] + row.get("seconds_down", 0.0)
            if "seconds_down" not in row:  # by a supervisor
                pending = pending or ended or row["restart"]
        elif "ready" in row and pending is not None:
            seconds, pending = seconds + row["ready"] - pending, None
    if not restarts:
        return {}
    return {
        "reliability/restarts": float(restarts), "reliability/steps_repeated": steps,
        "reliability/seconds_lost": seconds,
    }


@contextlib.contextmanager
def recorded_start(run_dir: Path, facts: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Append the rows of a start: `{"start": time, **facts}`, `{"ready": time}` when the yielded function is called,
    and at the end `{"end": time, "error": text or null}`; times are Unix timestamps in seconds.

    Disk errors are logged as warnings and do not fail the run.
    """
    append = functools.partial(append_row, run_dir)
    append({"start": time.time(), **facts})
    try:
        yield lambda: append({"ready": time.time()})
    except BaseException as error:
        append({"end": time.time(), "error": f"{type(error).__name__}: {error}".removesuffix(": ")})
        raise
    append({"end": time.time(), "error": None})

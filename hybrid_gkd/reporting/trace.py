"""trace.json: spans of all processes of a run, for Perfetto and chrome://tracing; see docs/observing.md.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.runtime.spans import SUFFIX, TRAINER, Clock, Counters, Span, SpanFile

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def trace_recording(run_dir: Path) -> Iterator[Clock]:
    """Provide the clock of a run's trainer; write the trace at the end, after the workers have ended."""
    with contextlib.closing(SpanFile(run_dir / "logs" / f"{TRAINER}{SUFFIX}")) as file:
        try:
            yield Clock(sink=file)
        finally:
            try:
                write_trace(run_dir)
            except OSError as error:
                logger.warning("cannot write trace.json: %s", error)


def write_trace(run_dir: Path) -> Path:
    """Merge the spans of a run folder into its trace.json. Raises OSError."""
    files = sorted((run_dir / "logs").glob(f"*{SUFFIX}"))
    if not files:
        raise FileNotFoundError(f"{run_dir} is no run folder with spans: it has no logs/*{SUFFIX}")
    path = run_dir / "trace.json"
    temporary = path.with_name("trace.json.tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write("[")
        rows = (row for file in files for row in read_json_lines(file))
        recorded = (Counters(*row) if isinstance(row[-1], dict) else Span(*row) for row in rows)
        for number, event in enumerate(_events(recorded)):
            out.write((",\n" if number else "\n") + json.dumps(event))
        out.write("\n]\n")
    return temporary.replace(path)


def _events(recorded: Iterable[Span | Counters]) -> Iterator[dict[str, Any]]:
    """Yield trace events in microseconds: complete events of spans, counter events, and metadata of new rows."""
    rows: dict[str, int] = {}
    for each in recorded:
        if each.row not in rows:
            role, _, rank = each.row.rpartition(" ")  # rollout workers follow the training workers
            pid = {TRAINER: 1, "teacher": 2}.get(each.row) or 3 + int(rank) + 10_000 * (role == "rollout worker")
            rows[each.row] = pid
            yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": each.row}}
            yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
        pid = rows[each.row]
        if isinstance(each, Counters):
            for name, value in each.values.items():
                yield {"name": name, "ph": "C", "ts": round(1e6 * each.at), "pid": pid, "args": {"value": value}}
            continue
        start, end = round(1e6 * each.start), round(1e6 * each.end)
        step = {} if each.step is None else {"args": {"step": each.step}}
        yield {"name": each.name, "ph": "X", "ts": start, "dur": end - start, "pid": pid, "tid": each.lane, **step}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the trace.json of a run folder.")
    parser.add_argument("run_folder", type=Path)
    try:
        print(write_trace(parser.parse_args().run_folder))
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

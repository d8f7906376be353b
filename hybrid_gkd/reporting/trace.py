"""trace.json: the spans of all processes of a run, for Perfetto and chrome://tracing; see docs/timeline.md.

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

from hybrid_gkd.files import read_json_lines
from hybrid_gkd.spans import SUFFIX, TRAINER, Clock, Span, SpanFile

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def recording(run_dir: Path) -> Iterator[Clock]:
    """The clock of a run's trainer; at the end the trace is written, when the workers have ended."""
    with contextlib.closing(SpanFile(run_dir / "logs" / f"{TRAINER}{SUFFIX}")) as file:
        try:
            yield Clock(sink=file)
        finally:
            try:
                write_trace(run_dir)
            except OSError as error:
                logger.warning("trace.json cannot be written: %s", error)


def write_trace(run_dir: Path) -> Path:
    """Merge the spans of a run folder into its trace.json. Raises OSError."""
    path = run_dir / "trace.json"
    temporary = path.with_name("trace.json.tmp")
    with temporary.open("w") as out:
        out.write("[")
        files = sorted((run_dir / "logs").glob(f"*{SUFFIX}"))
        spans = (Span(*row) for file in files for row in read_json_lines(file))
        for number, event in enumerate(_events(spans)):
            out.write((",\n" if number else "\n") + json.dumps(event))
        out.write("\n]\n")
    return temporary.replace(path)


def _events(spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Each span as a complete event in microseconds, the first of a row after the row's name and place."""
    rows: dict[str, int] = {}
    for span in spans:
        if span.row not in rows:
            role, _, rank = span.row.rpartition(" ")  # workers that only generate come after those that train
            pid = {TRAINER: 1, "teacher": 2}.get(span.row) or 3 + int(rank) + 10_000 * (role == "rollout worker")
            rows[span.row] = pid
            yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": span.row}}
            yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
        pid = rows[span.row]
        start, end = round(1e6 * span.start), round(1e6 * span.end)
        yield {"name": span.name, "ph": "X", "ts": start, "dur": end - start, "pid": pid, "tid": span.lane}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the trace.json of a run folder.")
    parser.add_argument("run_folder", type=Path)
    try:
        print(write_trace(parser.parse_args().run_folder))
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

"""trace.json: the spans of a run for Perfetto (ui.perfetto.dev) and chrome://tracing.

The JSON array format of the Trace Event Format: its end may be missing, so that the file of a run that was killed,
or still runs, opens too. Each call writes its spans through to the system.

The size is bounded: a file of MAX_BYTES becomes trace.old.json, in place of the one before, and a new one begins.
So the newest spans are always there, and both files together take at most twice as much.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid_gkd.spans import Span

MAX_BYTES = 32 * 2**20
"""About 300,000 spans."""
logger = logging.getLogger(__name__)


ROLLOUT_ROWS = 10_000
"""Rows of a pool that only generates come after so many of those that train."""


class TraceFile:
    """Writes spans to `path`, from the first one on. Microseconds count from the creation of this object.

    A file that is there already is kept as trace.N.json. A disk that fails costs the trace, with one warning, and
    not the run.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES):
        self.path = path
        self._max_bytes = max_bytes
        self._started = time.monotonic()
        self._failed = False
        self._lock = threading.Lock()
        self._file: FileIO | None = None

    def _begin(self) -> FileIO:
        self._size, self._rows = 0, set[str]()
        self._file = self.path.open("xb", buffering=0)
        self._append(self._file, b"[")
        return self._file

    def write(self, spans: Sequence[Span]) -> None:
        """Append spans."""
        with self._lock:
            if self._failed or not spans:
                return
            try:
                self._write(spans)
            except OSError as error:
                self._failed = True
                logger.warning("%s cannot be written, the run goes on without it: %s", self.path, error)

    def _write(self, spans: Sequence[Span]) -> None:
        file = self._file
        if file is None:
            if self.path.exists():
                names = (self.path.with_suffix(f".{n}.json") for n in range(1, 10**6))
                self.path.rename(next(name for name in names if not name.exists()))
            file = self._begin()
        elif self._size > self._max_bytes:
            self._end(file)
            self.path.replace(self.path.with_suffix(".old.json"))
            file = self._begin()
        events = [event for span in spans for event in self._events(span)]
        lines = ",\n".join(json.dumps(event) for event in events)
        self._append(file, (("\n" if self._size == 1 else ",\n") + lines).encode())

    def close(self) -> None:
        """End the array. Harmless when repeated."""
        if self._file is not None and not self._file.closed and not self._failed:
            try:
                self._end(self._file)
            except OSError as error:
                logger.warning("%s has no end: %s", self.path, error)

    def _end(self, file: FileIO) -> None:
        self._append(file, b"\n]\n")
        file.close()

    def _append(self, file: FileIO, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError:
            file.truncate(self._size)  # never a part of an event
            raise
        self._size += len(data)

    def _events(self, span: Span) -> list[dict[str, Any]]:
        """The span as a complete event, the first of a row with the row's name and place."""
        events: list[dict[str, Any]] = []
        fixed = {"trainer": 1, "teacher": 2}
        role, _, rank = span.row.rpartition(" ")
        pid = fixed[span.row] if span.row in fixed else 3 + int(rank) + ROLLOUT_ROWS * (role == "rollout worker")
        if span.row not in self._rows:
            self._rows.add(span.row)
            for name, argument in (("process_name", {"name": span.row}), ("process_sort_index", {"sort_index": pid})):
                events.append({"name": name, "ph": "M", "pid": pid, "args": argument})
        start, duration = (round(1e6 * value, 1) for value in (span.start - self._started, span.end - span.start))
        return [*events, {"name": span.name, "ph": "X", "ts": start, "dur": duration, "pid": pid, "tid": span.lane}]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, also where its end is missing."""
    *lines, last = path.read_text().rstrip().splitlines()
    if last.endswith("}"):
        with contextlib.suppress(ValueError):  # cut short where the run was killed
            json.loads(last)
            lines.append(last)
    return list(json.loads("\n".join(lines or ["["]).removesuffix(",") + "]"))

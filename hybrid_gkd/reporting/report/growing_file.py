"""Incremental reading of growing files."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STEP = re.compile(rb'\{"step": ?(\d+)[,}]')


class GrowingFile:
    """Reads each complete line of a growing file once."""

    def __init__(self, path: Path):
        self.path, self._read, self._file_id = path, 0, 0
        self.unreadable = 0
        """Lines read so far that are no rows."""

    def replaced(self) -> bool:
        """Return whether the file was replaced or truncated; if so, restart at its beginning."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        another = self._file_id not in (0, status.st_ino) or status.st_size < self._read
        self._file_id = status.st_ino
        if another:
            self._read = self.unreadable = 0
        return another

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield new complete lines with their byte offsets; none if the file is missing."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start, self._read = self._read, self._read + len(line)
                yield start, line

    def rows(self, *fields: str) -> Iterator[dict[str, Any]]:
        """Yield new lines that are JSON objects with these fields; count the others as unreadable."""
        for _, line in self.lines():
            if (row := parse_row(line, fields)) is not None:
                yield row
            else:
                self.unreadable += 1


def parse_row(line: bytes, fields: Sequence[str]) -> dict[str, Any] | None:
    """Return a line as a JSON object with these fields; None if it is none, as after a crash or damage."""
    with contextlib.suppress(ValueError):
        row = json.loads(line, parse_constant=int)  # refuses NaN, which no run writes
        if isinstance(row, dict) and all(field in row for field in fields):
            return row
    return None


def step_of(line: bytes) -> int | None:
    """Return the step of a row that starts with it, without parsing the rest; None if the row has another form."""
    found = STEP.match(line)
    return int(found[1]) if found and line.endswith(b"}\n") else None


def last_rows(path: Path, num_bytes: int) -> Iterator[Any]:
    """Yield the JSON rows within the last `num_bytes` of a file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        if size > num_bytes:
            file.readline()  # incomplete
        for line in file:
            with contextlib.suppress(ValueError):  # being written
                yield json.loads(line)

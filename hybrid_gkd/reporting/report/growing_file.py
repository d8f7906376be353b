"""Incremental reading of growing files."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP = re.compile(rb'\{"step": ?(\d+)[,}]')


class GrowingFile:
    """Reads each complete line of a growing file once."""

    def __init__(self, path: Path):
        self._path, self._read, self._file_id = path, 0, 0

    def replaced(self) -> bool:
        """Return whether the file was replaced or truncated; if so, restart at its beginning."""
        try:
            status = self._path.stat()
        except OSError:
            return False
        another = self._file_id not in (0, status.st_ino) or status.st_size < self._read
        self._file_id = status.st_ino
        if another:
            self._read = 0
        return another

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield new complete lines with their byte offsets; none if the file is missing."""
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start, self._read = self._read, self._read + len(line)
                yield start, line

    def rows(self) -> Iterator[Any]:
        """Yield new lines parsed as JSON; skip invalid lines."""
        for _, line in self.lines():
            with contextlib.suppress(ValueError):  # truncated by a crash
                yield json.loads(line)


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

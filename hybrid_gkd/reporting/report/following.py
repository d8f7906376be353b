"""Files that grow while they are read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEP = re.compile(rb'\{"step": ?(\d+)[,}]')


class Followed:
    """Gives each line of a file once, as bytes with their place in it. Lines that are not finished wait."""

    def __init__(self, path: Path):
        self._path, self._read, self._file_id = path, 0, 0

    def replaced(self) -> bool:
        """Whether the file is another than before, or shorter: it is then read from its beginning, and so again."""
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
        """Those that are new, each with the byte that it begins at. A file that is not there has none."""
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

    def rows(self) -> Iterator[tuple[int, Any]]:
        """The same, read as JSON; what is not JSON is left out."""
        for start, line in self.lines():
            try:
                yield start, json.loads(line)
            except ValueError:  # cut short by a crash
                continue


def step_of(line: bytes) -> int | None:
    """Of a row that begins with its step, as those of a run's files do; the rest, which can be long, is not parsed."""
    found = STEP.match(line)
    return int(found[1]) if found and line.endswith(b"}\n") else None


def last_rows(path: Path, num_bytes: int) -> Iterator[Any]:
    """The rows of JSON within the last bytes of a file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        if size > num_bytes:
            file.readline()  # a part of one
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # the one that is being written
                continue

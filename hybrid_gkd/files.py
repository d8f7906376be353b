"""Names of files, and files of JSON lines."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def free_path(stem: Path, suffix: str = "") -> Path:
    """`<stem>.N<suffix>` with the first N from 1 on under which nothing exists."""
    return next(p for n in itertools.count(1) if not (p := Path(f"{stem}.{n}{suffix}")).exists())


class JsonLinesFile:
    """Append-only, each row written through to the system at once, never a part of a row left behind."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def append(self, rows: Iterable[Any]) -> None:
        """Raises OSError, and ValueError for a number that JSON has not."""
        data, start = memoryview(encode(rows)), self.size()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(start)
            raise

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def encode(rows: Iterable[Any]) -> bytes:
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    # A lone surrogate, which a tokenizer may decode to, has no UTF-8 form.
    return "".join(lines).encode("utf-8", errors="replace")


def read_json_lines(path: Path) -> Iterator[Any]:
    """The rows of a file; a line cut short by a crash is left out."""
    with path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                yield json.loads(line)

"""A resumable file of completions: one JSON object per line, without partial lines.

Beside `answers.jsonl` are `answers.jsonl.json` with the arguments of the command, and `answers.jsonl.rejected` with the
rejected completions and their reasons. A completion in either file is done; row and number identify it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hybrid_gkd.errors import DataError
from hybrid_gkd.runtime.files import JsonLinesFile, cut_unfinished_line

logger = logging.getLogger(__name__)

ROW, SAMPLE = "row", "sample"
"""Columns that identify a completion: its row in the data, from 1 on, and its number, from 0 on."""
BAR_SECONDS, LINE_SECONDS = 0.5, 10.0
"""Seconds between two progress updates: on a terminal, and in a log file."""


def files_of(path: Path) -> tuple[Path, Path, Path]:
    """Return the files of the kept and of the rejected completions, and that of the arguments."""
    return path, path.with_name(f"{path.name}.rejected"), path.with_name(f"{path.name}.json")


class CompletionFile:
    """Completions on disk, locked for one process at a time; call `close` at the end.

    Args:
        path: file of the kept completions.
        arguments: JSON values that the completions depend on, by option name.

    Raises DataError: another process holds the file, it was made with other arguments, a line is malformed, or one of
    the files is not of this command; that is left as it is.
    """

    def __init__(self, path: Path, arguments: Mapping[str, Any]):
        self.path, self.rejected_path, self._sidecar = files_of(path)
        self.done: set[tuple[int, int]] = set()
        """Row and number of each completion in the files."""
        self.num_kept = 0
        self.reasons: Counter[str] = Counter()
        """Number of rejected completions by reason."""
        try:
            self._open(arguments)
        except OSError as error:
            raise DataError(f"--out {path}: cannot be written: {error}") from error

    def _open(self, arguments: Mapping[str, Any]) -> None:
        if (begun := self._begun()) and not self._sidecar.exists():  # which the lock would create
            raise self._foreign(begun[0])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = open(self._sidecar, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by `close`)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise DataError(f"--out {self.path}: another process is writing it") from error
        try:
            self._check_arguments(arguments)
            for line in self._lines(self.path):
                self.done.add((line[ROW], line[SAMPLE]))
                self.num_kept += 1
            for line in self._lines(self.rejected_path):
                self.done.add((line[ROW], line[SAMPLE]))
                self.reasons[line["rejected"]] += 1
            self._kept, self._rejected = JsonLinesFile(self.path), JsonLinesFile(self.rejected_path)
        except BaseException:
            self._lock.close()
            raise

    def _begun(self) -> list[Path]:
        """Return the files of completions that have some."""
        return [path for path in (self.path, self.rejected_path) if path.exists() and path.stat().st_size]

    def _foreign(self, path: Path) -> DataError:
        rule = f"exists, but not as a file of this command, which keeps its arguments in {self._sidecar.name}"
        return DataError(f"--out {self.path}: {path.name} {rule}; use another file")

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Compare the arguments with those of the existing files, or store them for new files."""
        stored = json.dumps(arguments, indent=2, ensure_ascii=False) + "\n"
        self._lock.seek(0)
        text, begun = self._lock.read(), self._begun()
        try:
            before = json.loads(text)
        except ValueError:
            before = None
        is_known = isinstance(before, dict) and bool(before.keys() & arguments.keys())
        is_cut = not begun and stored.startswith(text)  # empty, or of a process that was killed while it wrote
        if not is_known and not is_cut:
            raise self._foreign((begun or [self._sidecar])[0])
        if not begun:
            self._lock.truncate(0)
            self._lock.write(stored)
            self._lock.flush()
            os.fsync(self._lock.fileno())
            return
        for name in dict.fromkeys([*arguments, *before]):
            if before.get(name) != arguments.get(name):
                raise DataError(
                    f"--out {self.path} was made with {name} {before.get(name)!r}, not {arguments.get(name)!r}: use "
                    "the same value to continue it, or another file"
                )

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        """Return the lines of a file, after removing a partial last line of a killed process."""
        if not path.exists():
            return []
        if cut_unfinished_line(path):
            logger.warning("%s: removed an incomplete last line", path)
        found = []
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    value = json.loads(line)
                    found.append({name: value[name] for name in (ROW, SAMPLE)} | {"rejected": value.get("rejected")})
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DataError(f"{path}, line {number}: must be an object with {ROW} and {SAMPLE}") from error
        return found

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Write completions; those with the field `rejected`, a reason, go to the rejected file. Raises DataError."""
        kept = [line for line in lines if "rejected" not in line]
        rejected = [line for line in lines if "rejected" in line]
        try:
            for file, part in ((self._kept, kept), (self._rejected, rejected)):
                if part:
                    file.append(part)
        except OSError as error:
            raise DataError(f"--out {self.path}: cannot be written: {error}; free disk space and run again") from error
        self.num_kept += len(kept)
        self.reasons.update(line["rejected"] for line in rejected)

    def close(self) -> None:
        self._kept.close()
        self._rejected.close()
        self._lock.close()


class Progress:
    """Rows, tokens per second and time left: a progress bar on a terminal, else a log line every few seconds.

    Args:
        missing: row -> number of missing completions.
        num_rows: number of all rows, complete ones included.
        note: returns further text, such as the fraction that is kept.
    """

    def __init__(self, missing: Counter[int], num_rows: int, note: Callable[[], str]):
        self._missing, self._num_rows, self._note = missing, num_rows, note
        self._total, self._done, self._tokens = missing.total(), 0, 0
        self._rows_done = num_rows - len(missing)
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=num_rows, initial=self._rows_done, unit="row", file=sys.stderr, dynamic_ncols=True)

    def add(self, row: int, tokens: int) -> None:
        """Count a completion of a row."""
        self._done += 1
        self._tokens += tokens
        self._missing[row] -= 1
        if not self._missing[row]:
            self._rows_done += 1
            if self._bar is not None:
                self._bar.update(1)

    def show(self, *, last: bool = False) -> None:
        """Update the display if an update is due, or if `last`."""
        now = time.monotonic()
        if not last and now < self._last_line + (LINE_SECONDS if self._bar is None else BAR_SECONDS):
            return
        self._last_line = now
        if self._bar is not None:
            self._bar.set_postfix_str(self.describe(now))
        else:
            logger.info("%d of %d rows, %s", self._rows_done, self._num_rows, self.describe(now))

    def describe(self, now: float) -> str:
        """Return tokens per second, the note and the time left at `now`, a time.monotonic value."""
        seconds = max(now - self._started, 1e-9)
        left = seconds / self._done * (self._total - self._done) if self._done else None
        time_left = "" if left is None else f"{tqdm.format_interval(round(left))} left"
        return ", ".join(filter(None, [f"{self._tokens / seconds:.0f} tokens/s", self._note(), time_left]))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

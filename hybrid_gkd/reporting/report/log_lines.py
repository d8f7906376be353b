"""Parsing of run.log for a report: warnings, and findings of the preflight checks."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import NamedTuple

from hybrid_gkd.reporting.logs import RUN_LOG
from hybrid_gkd.reporting.report.growing_file import GrowingFile

WARNINGS_KEPT = 100
"""Number of newest warnings shown."""
TEXT_KEPT = 2000
"""Maximum number of characters of a warning; longer ones lose their middle."""
RECORD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)", re.DOTALL)
FACTS = ("versions", "folders", "engine", "device", "loss", "student", "reward", "files", "data", "teacher", "plan")
"""Preflight checks whose findings are shown."""
PLACED = re.compile(r"((?:actor |rollout )?worker \d+): (.*)", re.DOTALL)
CARD = re.compile(r"of (\d+\.\d+) GiB free")


class LogWarning(NamedTuple):
    time: str
    level: str
    text: str


class RunLog:
    """Warnings and facts from the part of run.log read so far."""

    def __init__(self, run_dir: Path):
        self._file = GrowingFile(run_dir / RUN_LOG)
        self._record: list[str] = []
        self.num_warnings = 0
        self.warnings: deque[LogWarning] = deque(maxlen=WARNINGS_KEPT)
        self.facts: dict[str, str] = {}
        """Findings of the newest start by check or worker."""
        self.card_gb: float | None = None
        """Memory of the smallest GPU, GiB."""

    def refresh(self) -> None:
        """Read new lines. A record is complete once the next one starts; `flush` completes the last one."""
        if self._file.replaced():
            self._record, self.num_warnings = [], 0
            self.warnings.clear()
        for _, line in self._file.lines():
            text = line.decode("utf-8", errors="replace")
            if self._record and RECORD.match(text):
                self._end_record()
            self._record.append(text)

    def flush(self) -> None:
        """Process the last record read."""
        if self._record:
            self._end_record()

    def _end_record(self) -> None:
        """Process the collected lines of a record."""
        found, self._record = RECORD.match("".join(self._record)), []
        if found is None:
            return
        time, level, text = found.groups()
        text = text.rstrip()
        if level == "INFO":
            self._add_fact(text)
        elif level != "DEBUG":
            self.num_warnings += 1
            half = TEXT_KEPT // 2
            short = text if len(text) <= TEXT_KEPT else f"{text[:half]}\n…\n{text[-half:]}"
            self.warnings.append(LogWarning(time, level, short))

    def _add_fact(self, text: str) -> None:
        name, _, finding = text.partition(": ")
        placed = PLACED.fullmatch(text)
        if name == "versions":  # the first check of a start
            self.facts.clear()
            self.card_gb = None
        if placed is not None:
            name, finding = placed.groups()
            sizes = [float(size) for size in CARD.findall(finding)]
            self.card_gb = min([*sizes, *([self.card_gb] if self.card_gb else [])], default=None)
        elif name not in FACTS or name in self.facts:  # later lines with the same prefix are other messages
            return
        self.facts[name] = finding

"""What a run says: on the console, and with all details in run.log of its folder."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

from tqdm import tqdm

from hybrid_gkd.errors import ConfigError

RUN_LOG = "run.log"
TIME = "%Y-%m-%d %H:%M:%S"
PACKAGE = logging.getLogger("hybrid_gkd")
"""Its messages at INFO and above are for the console; those at DEBUG are for run.log alone."""
EARLY_LINES = 10_000
"""Kept, at most, of what is said before there is a run folder."""


class ConsoleHandler(logging.StreamHandler):
    """Standard error: above the progress bar where there is one, with the time where it is not a terminal."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.INFO)
        self._terminal = self.stream.isatty()
        self.setFormatter(logging.Formatter("%(message)s" if self._terminal else "%(asctime)s %(message)s", TIME))
        self.addFilter(lambda record: not hasattr(record, "log_only"))

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream) if self._terminal else contextlib.nullcontext():
            super().emit(record)


class RunLogFile(logging.FileHandler):
    """run.log. A full disk costs lines of it, which the console has, and no more than one line there."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="replace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", TIME))
        self._failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            PACKAGE.warning("%s cannot be written, the run goes on without it: %s", self.baseFilename, error)


def log_to_console() -> None:
    """Show this package's messages and the warnings of others; keep them for `run_log`."""
    early = MemoryHandler(EARLY_LINES, flushLevel=logging.CRITICAL + 1)
    logging.basicConfig(level=logging.WARNING, handlers=[ConsoleHandler(), early])
    logging.captureWarnings(True)
    PACKAGE.setLevel(logging.DEBUG)


def print_whatever_the_locale() -> None:
    """Have standard output show ? for characters that its encoding lacks, where a print would end the program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def quieten() -> None:
    """From now on the console shows warnings and errors only; run.log has everything."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ConsoleHandler):
            handler.setLevel(logging.WARNING)


@contextlib.contextmanager
def run_log(run_dir: Path) -> Iterator[None]:
    """Append to run.log what was logged before, and what is within the block. Raises ConfigError if it cannot."""
    try:
        file = RunLogFile(run_dir / RUN_LOG)
    except OSError as error:
        raise ConfigError("trainer.default_local_dir", f"cannot be written to: {error}", show_value=False) from error
    root, level = logging.getLogger(), PACKAGE.level
    for early in [handler for handler in root.handlers if isinstance(handler, MemoryHandler)]:
        early.setTarget(file)
        early.close()
        root.removeHandler(early)
    root.addHandler(file)
    PACKAGE.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        PACKAGE.setLevel(level)
        root.removeHandler(file)
        with contextlib.suppress(OSError):  # of a full disk, which has been said
            file.close()


@contextlib.contextmanager
def failure_logged() -> Iterator[None]:
    """Write what ends the block into run.log, with its traceback; the console shows the message alone."""
    try:
        yield
    except BaseException as error:
        what = f"the run ends: {type(error).__name__}: {error}"
        PACKAGE.error(what, exc_info=True, extra={"log_only": True})
        raise

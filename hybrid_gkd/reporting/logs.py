"""Logging of a run: on the console, and in full detail in run.log of the run folder."""

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
"""Logger of this package: INFO and above go to the console, DEBUG only to run.log."""
EARLY_LINES = 10_000
"""Maximum number of log records buffered until the run folder exists."""


class ConsoleHandler(logging.StreamHandler):
    """Handler for standard error: above the progress bar, if any; with the time unless on a terminal."""

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
    """Handler for run.log. Lines lost to a full disk are still on the console, with a single warning there."""

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
            PACKAGE.warning("cannot write %s, the run continues without it: %s", self.baseFilename, error)


def log_to_console() -> None:
    """Log this package's messages and the warnings of others to the console; buffer them for `run_log`."""
    early = MemoryHandler(EARLY_LINES, flushLevel=logging.CRITICAL + 1)
    logging.basicConfig(level=logging.WARNING, handlers=[ConsoleHandler(), early])
    logging.captureWarnings(True)
    PACKAGE.setLevel(logging.DEBUG)


def replace_unencodable() -> None:
    """Make standard output print ? for characters that its encoding lacks, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def silence_console() -> None:
    """Limit the console to warnings and errors; run.log stays complete."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ConsoleHandler):
            handler.setLevel(logging.WARNING)


@contextlib.contextmanager
def run_log(run_dir: Path) -> Iterator[None]:
    """Log to run.log within the context, after the buffered records. Raises ConfigError: it cannot be written."""
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
        with contextlib.suppress(OSError):  # a full disk has been reported already
            file.close()


@contextlib.contextmanager
def failure_logged() -> Iterator[None]:
    """Log an exception from the context to run.log with its traceback; the console shows the message only."""
    try:
        yield
    except BaseException as error:
        what = f"run failed: {type(error).__name__}: {error}"
        PACKAGE.error(what, exc_info=True, extra={"log_only": True})
        raise

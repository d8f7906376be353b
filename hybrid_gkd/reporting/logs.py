"""Logging of a run: on the console, and in full detail in run.log of the run folder."""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import traceback
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

from tqdm import tqdm

import hybrid_gkd
from hybrid_gkd.errors import ConfigError, describe_error
from hybrid_gkd.process_limits import describe_refusal

RUN_LOG = "run.log"
TIME = "%Y-%m-%d %H:%M:%S"
PACKAGE = logging.getLogger("hybrid_gkd")
"""Logger of this package: INFO and above go to the console, DEBUG only to run.log."""
TRACEBACK = "traceback: "
"""Beginning of the note of an exception whose traceback has been written to a file."""
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


def silence_console(*shown: str) -> None:
    """Limit the console to warnings, errors and the records of the loggers `shown`; run.log stays complete."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ConsoleHandler):
            handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name in shown)


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
        if _logged_in(error) is None:  # else by a block within this one
            what = f"run failed: {type(error).__name__}: {error}"
            PACKAGE.error(what, exc_info=True, extra={"log_only": True})
            for handler in logging.getLogger().handlers:
                if isinstance(handler, RunLogFile):
                    error.add_note(f"{TRACEBACK}{handler.baseFilename}")
        raise


def _logged_in(error: BaseException) -> str | None:
    """Return the note that names the file with the traceback of an exception; None without one."""
    return next((note for note in getattr(error, "__notes__", []) if note.startswith(TRACEBACK)), None)


def describe_unexpected(error: Exception) -> str:
    """Return an error that this package does not expect in one line: place, type, message, and file of the traceback.

    The file is run.log if a block of `failure_logged` has written the traceback there, else a new temporary one.
    """
    root, notes = Path(hybrid_gkd.__file__).parent, list(getattr(error, "__notes__", []))
    inner = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(root)]
    place = "the command"
    if inner:
        module = Path(inner[-1].filename).relative_to(root.parent).with_suffix("")
        place = f"{'.'.join(module.parts)}.{inner[-1].name}"
    if (logged := _logged_in(error)) is None:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", prefix="hybrid_gkd_error_", suffix=".log", delete=False
        ) as log:
            traceback.print_exception(error, file=log)
        logged = f"{TRACEBACK}{log.name}"
    where = ", ".join([place, *(note for note in notes if note != logged)])
    what = "no new process or thread in" if describe_refusal(error) else "unexpected error in"
    return f"{what} {where}: {describe_error(error)}; {logged}"

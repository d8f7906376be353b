"""Live report of an active run, written by a separate process so that steps do not wait for it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hybrid_gkd.reporting.report.command import FOLLOW
from hybrid_gkd.reporting.report.page import REPORT
from hybrid_gkd.runtime.waiting import Timeout, waiting

logger = logging.getLogger(__name__)

REPORT_SECONDS = 60.0
"""Timeout of the last report at the end of a run."""


@contextlib.contextmanager
def live_report(run_dir: Path) -> Iterator[None]:
    """Update report.html of a run within the context, at most every 30 s, and once at its end.

    Errors are logged as warnings and do not fail the run.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybrid_gkd.report", FOLLOW, str(run_dir)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,  # Ctrl-C must reach only the run
        )  # fmt: skip
    except OSError as error:
        logger.warning("cannot write report.html: %s", error)
        yield
        return
    try:
        yield
    except BaseException:
        _end(process)
        if (page := run_dir.absolute() / REPORT).is_file():  # otherwise it is in the final table
            logger.info("report of the run so far (open in a browser): %s", page.as_uri())
        raise
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the last report; log a warning if it fails."""
    try:
        with waiting("the last report.html", Timeout(REPORT_SECONDS)):
            output, _ = process.communicate(timeout=REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("report.html is outdated: its last version was not finished in %.0f s", REPORT_SECONDS)
        return
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode:
        reason = output.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        logger.warning("report.html is outdated: %s", reason[0])

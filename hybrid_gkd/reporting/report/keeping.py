"""The report of a run that goes on, written by a process of its own.

So a step does not wait for it: the trainer's process starts it, and at the end tells it that the run has ended.
"""

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
"""How long the end of a run waits for its last report."""


@contextlib.contextmanager
def report_kept(run_dir: Path) -> Iterator[None]:
    """Keep report.html of a run up to date: at most every 30 s, and when the block has ended.

    What goes wrong with it costs the report, with a warning, and not the run.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybrid_gkd.report", FOLLOW, str(run_dir)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,  # Ctrl-C is for the run
        )  # fmt: skip
    except OSError as error:
        logger.warning("report.html is not written: %s", error)
        yield
        return
    try:
        yield
    except BaseException:
        _end(process)
        if (page := run_dir.absolute() / REPORT).is_file():  # at the end of a run that does not fail a table names it
            logger.info("report of the run so far, to open in a browser: %s", page.as_uri())
        raise
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the last report written, or say why it is not."""
    try:
        with waiting("the last report.html", Timeout(REPORT_SECONDS)):
            said, _ = process.communicate(timeout=REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("report.html was not finished in %.0f s", REPORT_SECONDS)
        return
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode:
        reason = said.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        logger.warning("report.html is not up to date: %s", reason[0])

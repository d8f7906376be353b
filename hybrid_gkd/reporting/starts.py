"""starts.jsonl in the run folder: each start of a run with its ready time, end and error."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybrid_gkd.runtime.files import JsonLinesFile

logger = logging.getLogger(__name__)

STARTS = "starts.jsonl"


@contextlib.contextmanager
def recorded_start(run_dir: Path, facts: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Append the rows of a start: `{"start": time, **facts}`, `{"ready": time}` when the yielded function is called,
    and at the end `{"end": time, "error": text or null}`; times are Unix timestamps in seconds.

    Disk errors are logged as warnings and do not fail the run.
    """
    def append(row: dict[str, Any]) -> None:
        try:
            with contextlib.closing(JsonLinesFile(run_dir / STARTS)) as file:
                file.append([row])
        except OSError as error:
            logger.warning("cannot write %s, the run continues without its rows: %s", STARTS, error)

    append({"start": time.time(), **facts})
    try:
        yield lambda: append({"ready": time.time()})
    except BaseException as error:
        append({"end": time.time(), "error": f"{type(error).__name__}: {error}".removesuffix(": ")})
        raise
    append({"end": time.time(), "error": None})

"""Tracker for Trackio, a local dashboard with wandb's API (`trackio show`)."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hybrid_gkd.types import GENERATION_COLUMNS, Generation, RunInfo

logger = logging.getLogger(__name__)


class Trackio:
    """Logs to trackio's local database (TRACKIO_DIR). A resumed run continues the run of the same name."""

    def __init__(self, info: RunInfo):
        import trackio  # optional dependency; the import takes half a second

        self._trackio = trackio
        with contextlib.redirect_stdout(io.StringIO()):  # a banner
            self._run = trackio.init(
                project=info.project_name, name=info.experiment_name, config=dict(info.config), embed=False,
                resume="allow" if info.resume else "never", auto_log_gpu=False, auto_log_cpu=False,
            )
        logger.info('view the run in a browser: trackio show --project "%s"', info.project_name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        rows = [[step, *asdict(sample).values()] for sample in samples]
        table = self._trackio.Table(columns=list(GENERATION_COLUMNS), rows=rows)
        self._run.log({"val/generations": table}, step=step)

    def close(self, *, failed: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # the run's own method would be called again at exit

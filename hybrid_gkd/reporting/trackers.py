"""Trackers: destinations of a run's metrics, the run's own files and those of `trainer.logger`.

A tracker that cannot start is an error. A tracker that fails later is logged once as a warning, and training continues:
a full disk or a lost connection must not fail the run.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.reporting.console import Console, format_metrics
from hybrid_gkd.reporting.jsonl import JsonLines
from hybrid_gkd.reporting.metric_table import check_names
from hybrid_gkd.reporting.tensorboard import TensorBoard
from hybrid_gkd.reporting.trackio import Trackio
from hybrid_gkd.reporting.wandb_tracker import Wandb
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.runtime.imports import install_command, load_object
from hybrid_gkd.types import Generation, MetricLog, RunInfo

logger = logging.getLogger(__name__)


class Tracker(MetricLog, Protocol):
    """Destination of metrics, constructed as `Tracker(info)`. A failing constructor must leave nothing open."""

    def close(self, *, failed: bool) -> None:
        """Finish at the end of the run; `failed`: whether it ended with an error."""


# In the order of their start: Wandb reads metrics.jsonl after JsonLines has truncated it. Their names are accepted in
# config/metadata.py.
TRACKERS: dict[str, Callable[[RunInfo], Tracker]] = {
    "console": Console, "jsonl": JsonLines, "tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb,
}  # fmt: skip
EXTRAS = {"tensorboard": "tensorboard>=2.20", "trackio": "trackio>=0.43"}
"""Requirements of trackers that need an optional package of the same name, as in the extras of setup.cfg."""


def load_trackers(loggers: Sequence[str]) -> dict[str, Callable[[RunInfo], Tracker]]:
    """Return the classes of `trainer.logger`, custom ones last.

    Raises ConfigError: a custom class cannot be imported, or a package is missing.
    """
    for name, package in EXTRAS.items():
        if name in loggers and importlib.util.find_spec(name) is None:
            rule = f"{name} needs a package that is not installed: {install_command(package)}"
            raise ConfigError("trainer.logger", rule, list(loggers))
    own = {name: load_object("trainer.logger", name) for name in loggers if name not in TRACKERS}
    return {name: made for name, made in TRACKERS.items() if name in loggers or name == "jsonl"} | own


class Tracking:
    """Sends the metrics of a run to metrics.jsonl, run.log and the trackers of `trainer.logger`.

    Raises ConfigError: a tracker cannot start.
    """

    def __init__(self, loggers: Sequence[str], info: RunInfo):
        self._trackers: dict[str, Tracker] = {}
        self._warned: set[str] = set()
        self._last_step = info.start_step if info.resume else -1
        for name, make in load_trackers(loggers).items():
            try:
                self._trackers[name] = make(info)
            except Exception as error:
                self.close(failed=True)
                if name == "jsonl":  # always on
                    rule = f"cannot be written to: {error}"
                    raise ConfigError("trainer.default_local_dir", rule, str(info.run_dir)) from error
                rule = f"{name} cannot start: {error} (remove {name} to train without it)"
                raise ConfigError("trainer.logger", rule, list(loggers)) from error
        self._started = time.monotonic() - (elapsed_before(info.run_dir) if info.resume else 0.0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        check_names(metrics)
        assert step > self._last_step, f"step {step} is reported after step {self._last_step}"
        self._last_step = step
        numbers = {name: float(value) for name, value in metrics.items()}
        numbers["timing/elapsed"] = time.monotonic() - self._started
        logger.debug("step %d  %s", step, format_metrics(numbers))
        self._each(lambda tracker: tracker.log(numbers, step))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        if samples:
            self._each(lambda tracker: tracker.log_generations(samples, step))

    def log_lengths(self, lengths: Sequence[int], step: int) -> None:
        """Log the completion lengths of a step to the run folder only, not to other trackers."""
        self._to_files(lambda files: files.log_lengths(lengths, step))

    def log_tokens(self, answers: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log token-level scores of held-out completions to the run folder only."""
        self._to_files(lambda files: files.log_tokens(answers, step))

    def close(self, *, failed: bool = False) -> None:
        """Finish all trackers; idempotent."""
        self._each(lambda tracker: tracker.close(failed=failed))
        self._trackers.clear()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close(failed=error is not None)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            self._attempt(name, functools.partial(call, tracker))

    def _to_files(self, call: Callable[[JsonLines], None]) -> None:
        files = self._trackers["jsonl"]
        assert isinstance(files, JsonLines)
        self._attempt("jsonl", lambda: call(files))

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # no error of a tracker may fail the run
            if name not in self._warned:
                self._warned.add(name)
                reason = f"{type(error).__name__}: {error}"
                if name == "jsonl":
                    logger.warning("cannot write metrics.jsonl and generations.jsonl, will retry: %s", reason)
                else:
                    logger.warning("trainer.logger: %s failed, training continues without it: %s", name, reason)


def elapsed_before(run_dir: Path) -> float:
    """Return the largest `timing/elapsed` in metrics.jsonl; 0 without one."""
    path = run_dir / "metrics.jsonl"
    rows = read_json_lines(path) if path.is_file() else ()
    return max((row.get("timing/elapsed", 0.0) for row in rows), default=0.0)

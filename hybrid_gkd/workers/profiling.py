"""Run torch's profiler in the steps of `trainer.profile_steps`, in one worker's process.

Other steps import and measure nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_gkd.runtime.files import free_path


class StepProfiler:
    """Profiles a worker in given steps, and writes files for Perfetto: `profile_step_5_worker_0.json.gz`.

    If work for a step is interrupted by work for another one (`trainer.scheduler=one_step_off`), each part has its own
    file, `.1.json.gz` from the second one on.
    """

    def __init__(self, steps: list[int], folder: Path, worker: str):
        self._steps, self._folder, self._worker = frozenset(steps), folder, worker.replace(" ", "_")
        self._step: int | None = None
        self._profile: Any = None
        self._outcomes: list[str] = []

    def begin(self, step: int | None) -> None:
        """Attribute the following work to a step."""
        self.end()
        self._step = step
        if step in self._steps:
            try:
                from torch.profiler import profile

                self._profile = profile()
                self._profile.start()
            except Exception as error:
                self._fail(error)

    def end(self) -> None:
        """Write the profile."""
        if self._profile is None:
            return
        stem, suffix = self._folder / f"profile_step_{self._step}_{self._worker}", ".json.gz"
        first = Path(f"{stem}{suffix}")
        path = free_path(stem, suffix) if first.exists() else first
        try:
            self._profile.stop()
            self._profile.export_chrome_trace(str(path))
            self._outcomes.append(str(path))
        except Exception as error:
            self._fail(error)
        self._profile = None

    def _fail(self, error: Exception) -> None:
        """Drop the profile after a failure of profiler or disk, and continue the run."""
        self._profile = None
        self._outcomes.append(f"no profile of {self._worker}: {type(error).__name__}: {error}")

    def take_outcomes(self) -> list[str]:
        """End the profile; return the files since the last call, or the reasons of failures."""
        self.end()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

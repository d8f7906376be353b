"""torch's profiler around the steps of `trainer.profile_steps`, in the process of one worker.

Nothing is imported or measured in other steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_gkd.runtime.files import free_path


class StepProfiler:
    """Profiles what a worker does for some steps, and writes it for Perfetto: `profile_step_5_worker_0.json.gz`.

    Work for one step that work for another one interrupts (`trainer.scheduler=one_step_off`) makes a file for each
    part, `.1.json.gz` from the second on.
    """

    def __init__(self, steps: list[int], folder: Path, worker: str):
        self._steps, self._folder, self._worker = frozenset(steps), folder, worker.replace(" ", "_")
        self._step: int | None = None
        self._profile: Any = None
        self._outcomes: list[str] = []

    def begin(self, step: int | None) -> None:
        """What follows is work for this step."""
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
        """Write what was profiled."""
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
        """A profiler or disk that fails costs the profile and not the run."""
        self._profile = None
        self._outcomes.append(f"no profile of {self._worker}: {type(error).__name__}: {error}")

    def take_outcomes(self) -> list[str]:
        """End, and return the files since the last call, or why one could not be written."""
        self.end()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

"""Reader of a run folder for the report; reads only what is new."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hybrid_gkd.config.flat import differences, flat
from hybrid_gkd.reporting.report.downsampling import Counts, Downsampled, Point, evenly_spaced, round_significant
from hybrid_gkd.reporting.report.growing_file import GrowingFile, parse_row, step_of
from hybrid_gkd.reporting.report.log_lines import LogWarning, RunLog
from hybrid_gkd.reporting.report.timeline import representative_step
from hybrid_gkd.reporting.starts import STARTS

POINTS = 600
"""Maximum number of points of a curve."""
COLUMNS = 80
"""Maximum number of columns of the histograms over time."""
VALIDATIONS, SAMPLES = 8, 8
"""Maximum numbers of validations with samples, and of samples of each."""
PROMPT_KEPT, COMPLETION_KEPT = 2000, 4000
"""Maximum numbers of characters of prompts and completions."""
PARTS = tuple(
    f"timing/{part}" for part in (
        "gen", "wait_prev_gen", "wait_prev_teacher", "reward", "reward_model", "values", "update_critic", "ref",
        "update_actor", "sync_rollout_weights", "testing", "save_checkpoint", "snapshot", "other",
    )
)  # fmt: skip
"""Phases of a step in stacking order; 0 in steps without the phase."""
UNFINISHED = "no exit status: the process was killed or the host was lost"


class RunFolder:
    """A run on disk."""

    def __init__(self, path: Path, points: int = POINTS):
        self.path, self._points = path.resolve(), points
        self._metrics, self._lengths = GrowingFile(path / "metrics.jsonl"), GrowingFile(path / "lengths.jsonl")
        self._answers, self._starts = GrowingFile(path / "generations.jsonl"), GrowingFile(path / STARTS)
        self.log = RunLog(path)
        self.starts: list[dict[str, Any]] = []
        """Starts of the run: `start`, `ready` and `end` times as far as reached, `error`, and facts."""
        self.restarts: list[dict[str, Any]] = []
        """Restarts within a start, with other workers: `restart` time and `resumed_step`."""
        self._reset_metrics()
        self._reset_lengths()
        self._validations: dict[int, list[int]] = {}
        self._tokens, self._token_places = GrowingFile(path / "tokens.jsonl"), dict[int, list[int]]()

    def _reset_metrics(self) -> None:
        self._series: dict[str, Downsampled[Point]] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        """First and newest value of each metric."""
        self.step, self.tokens = 0, 0.0

    def _reset_lengths(self) -> None:
        self._counts, self._bin = Downsampled[Counts](COLUMNS), 1

    def refresh(self) -> None:
        """Read new rows of all files."""
        if self._metrics.replaced():  # a resumed run drops the rows of repeated steps
            self._reset_metrics()
        if self._lengths.replaced():
            self._reset_lengths()
        if self._answers.replaced():
            self._validations = {}
        if self._tokens.replaced():
            self._token_places = {}
        if self._starts.replaced():
            self.starts, self.restarts = [], []
        for row in self._starts.rows():
            if "start" in row:
                self.starts.append(row)
            elif "resumed_step" in row:
                self.restarts.append(row)
            elif self.starts:
                self.starts[-1] |= row
        for row in self._metrics.rows("step"):
            self._add_metrics(row)
        for row in self._lengths.rows("step", "bin", "counts"):
            if row["bin"] != self._bin:  # resumed with another limit: other bin width
                self._reset_lengths()
                self._bin = row["bin"]
            self._counts.add(Counts(row["step"], tuple(row["counts"])))
        for file, places in ((self._answers, self._validations), (self._tokens, self._token_places)):
            for start, line in file.lines():
                if (step := step_of(line)) is not None:
                    places.setdefault(step, []).append(start)
        self.log.refresh()

    def _add_metrics(self, row: dict[str, float]) -> None:
        if not all(isinstance(value, int | float) for value in row.values()):
            self._metrics.unreadable += 1
            return
        step = int(row.pop("step"))
        if "timing/step" in row:
            self.tokens += row.get("perf/tokens_per_second", 0.0) * row["timing/step"]
        for name, value in (dict.fromkeys(PARTS, 0.0) | row).items():
            self._series.setdefault(name, Downsampled(self._points)).add(Point.of(step, value))
        for name, value in row.items():
            self.first.setdefault(name, value)
            self.last[name] = value
        self.step = step

    def data(self) -> dict[str, Any]:
        """Return the data of the page, with unescaped texts; call `refresh` first."""
        self.log.flush()
        config = self.config()
        newest = self.starts[-1] if self.starts else {}
        starts = [(start["start"], start.get("step", 0)) for start in self.starts]
        starts += [(restart["restart"], restart["resumed_step"]) for restart in self.restarts]
        damage = [
            LogWarning("", "WARNING", f"{file.path.name}: damaged lines, which this report omits: {file.unreadable}")
            for file in (self._metrics, self._lengths, self._starts) if file.unreadable
        ]
        axes: dict[tuple[int, ...], int] = {}
        metrics = {name: self._curve(self._series[name], axes) for name in self._series if name in self.last}
        # Separate pools generate in the background; the step has only the wait for it.
        parts = [name for name in PARTS if name != "timing/gen" or "timing/wait_prev_gen" not in metrics]
        measured = [name for name in parts if name in metrics]
        seconds = {name: round_significant(sum(point.total for point in self.points(name))) for name in measured}
        return {
            "name": self.path.name, "project": self.path.parent.name, "folder": str(self.path),
            "state": self.state(), "axes": list(axes), "metrics": metrics, "seconds": seconds,
            "timeline": representative_step(self.path, starts), "card_gb": self.log.card_gb,
            "device": newest.get("loaded", {}).get("device"),
            "answers": self._chosen_samples(), "lengths": self._histograms(),
            "max_length": config.get("data.max_response_length"),
            "config": config, "recipe": newest.get("recipe"), "changed": newest.get("changed", {}),
            "earlier": self._earlier_configs(config), "facts": self.log.facts,
            "warnings": [*self.log.warnings, *damage], "num_warnings": self.log.num_warnings + len(damage),
            "resumed": [step for _, step in starts if step],
        }

    def points(self, name: str) -> list[Point]:
        """Return the points of a metric, at most as many as a curve has; none if it was not measured."""
        return self._series[name].items() if name in self._series else []

    def _curve(self, series: Downsampled[Point], axes: dict[tuple[int, ...], int]) -> dict[str, Any]:
        points = series.items()
        axis = axes.setdefault(tuple(point.step for point in points), len(axes))
        curve: dict[str, Any] = {"axis": axis, "mean": [round_significant(point.mean) for point in points]}
        if series.every > 1:
            curve |= {
                "every": series.every, "low": [round_significant(p.low, 4) for p in points],
                "high": [round_significant(p.high, 4) for p in points],
            }  # fmt: skip
        return curve

    def _histograms(self) -> dict[str, Any] | None:
        items = self._counts.items()
        if not items:
            return None
        return {
            "bin": self._bin, "every": self._counts.every, "steps": [item.step for item in items],
            "counts": [item.counts for item in items],
        }  # fmt: skip

    def _chosen_samples(self) -> list[dict[str, Any]]:
        """Return samples of some validations from the first to the last; long texts are truncated."""
        chosen = []
        for step in evenly_spaced(sorted(self._validations), VALIDATIONS):
            scored = {
                (row["prompt"], row["response"]): {"tokens": row["tokens"], "num_tokens": row["num_tokens"]}
                for row in self._rows_at(self._tokens, self._token_places.get(step, []), ("tokens", "num_tokens"))
            }
            samples = [
                {
                    "prompt": _cut(row["prompt"], PROMPT_KEPT), "response": _cut(row["response"], COMPLETION_KEPT),
                    "answer": row["answer"] and _cut(row["answer"], PROMPT_KEPT), "reward": row["reward"],
                    **scored.get((row["prompt"], row["response"]), {}),
                }
                for row in self._rows_at(self._answers, self._validations[step][:SAMPLES], ("answer", "reward"))
            ]  # fmt: skip
            chosen.append({"step": step, "samples": samples, "of": len(self._validations[step])})
        return chosen

    @staticmethod
    def _rows_at(source: GrowingFile, places: list[int], fields: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Yield the rows at these byte offsets, of a sample, that have these fields too."""
        if not places:
            return
        with source.path.open("rb") as file:
            for place in places:
                file.seek(place)
                if (row := parse_row(file.readline(), ("prompt", "response", *fields))) is not None:
                    yield row  # the others were truncated by a crash

    def config(self, file: str = "config.yaml") -> dict[str, Any]:
        """Return the resolved configuration by dotted key; empty if it is missing or cannot be read."""
        try:
            loaded = OmegaConf.load(self.path / file)
        except Exception:  # errors of yaml, OmegaConf and the disk: the page is useful without it
            return {}
        return flat(OmegaConf.to_container(loaded, resolve=False))

    def _earlier_configs(self, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the settings of each earlier start that differ from the present ones."""
        files = sorted(self.path.glob("config.*.yaml"), key=lambda file: (len(file.name), file.name))
        earlier = [(file.name, self.config(file.name)) for file in files]
        return [{"file": name, "changed": differences(then, config)} for name, then in earlier]

    def state(self) -> dict[str, Any]:
        """Return progress and outcome of the run."""
        newest = self.starts[-1] if self.starts else {}
        total, error = newest.get("total_steps"), newest.get("error")
        if "end" in newest:
            outcome = "failed" if error else "finished" if self.step == total else "ended early"
        elif self._is_locked():
            outcome = "running"
        elif newest:
            outcome, error = "failed", UNFINISHED
        else:
            outcome = "unknown"
        return {"outcome": outcome, "error": error, "step": self.step, "total": total, "starts": len(self.starts)}

    def _is_locked(self) -> bool:
        """Return whether a process trains in the folder."""
        try:
            with open(self.path.parent / f".{self.path.name}.lock", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a copied run folder has no lock file
            return False
        return False

    def checkpoint_step(self) -> int | None:
        """Return the step of the newest checkpoint; None without one."""
        try:
            return int((self.path / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]} … ({len(text) - characters} characters more)"

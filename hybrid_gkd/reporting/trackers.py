"""Where the numbers of a run go: the console, metrics.jsonl, Weights & Biases.

    with Tracking(["console", "jsonl"], project_name="gkd", ..., start_step=0, resume=False) as tracking:
        for step in range(1, total_steps + 1):
            tracking.log_generations(samples, step)     # before log() of the same step
            tracking.log(metrics, step)                 # once per step, everything the step reports

A tracker that cannot start is an error, since the user asked for it. A tracker that fails later warns
once and training goes on: a full disk or a lost connection is no reason to lose the run.

A run that resumes at step s forgets what an interrupted run wrote of later steps, so that no step
appears twice in metrics.jsonl and generations.jsonl.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit

from tqdm import tqdm

from hybrid_gkd.errors import ConfigError
from hybrid_gkd.reporting.metrics import check_names

logger = logging.getLogger(__name__)

LOGGERS = ("console", "jsonl", "wandb")

PLAIN_LINE_SECONDS = 5.0
"""Without a terminal, a step that ends sooner after the last line gets no line of its own."""
WANDB_FINISH_SECONDS = 300.0
"""How long the end of a run waits for uploads; what is missing then can be sent with `wandb sync`."""

WANDB_PUBLIC_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sample answer of the student, for people to read.

    Example: Generation(prompt="12+30=", response="The sum is 42.", answer="42", reward=1.0)
    """

    prompt: str
    response: str
    answer: str | None = None
    """Ground truth; None where the data has none."""
    reward: float | None = None


class Tracker(Protocol):
    """One destination. A constructor that fails leaves nothing open."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_generations(self, samples: Sequence[Generation], step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Tracking:
    """Sends the metrics of a run to every configured tracker."""

    def __init__(
        self,
        loggers: Sequence[str],
        *,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        total_steps: int,
        start_step: int,
        resume: bool,
    ):
        """Start the trackers.

        Args:
            loggers: any of "console", "jsonl", "wandb".
            run_dir: the folder of the run; every file goes there.
            config: the resolved configuration, attached to the run.
            start_step: steps already done; 0 for a new run, the checkpoint's step for a resumed one.
            resume: continue the files of the run in run_dir. Otherwise files found there are kept
                under another name.
        """
        unknown = sorted(set(loggers) - set(LOGGERS))
        if unknown:
            raise ConfigError("trainer.logger", f"must be a list of any of {', '.join(LOGGERS)}", list(loggers))
        run_dir = Path(run_dir)
        self._trackers: dict[str, Tracker] = {}
        self._warned: set[str] = set()
        self._kept_step = start_step if resume else -1
        self._last_step = -1
        start: dict[str, Callable[[], Tracker]] = {
            "console": lambda: Console(total_steps=total_steps, start_step=start_step),
            "jsonl": lambda: JsonLines(run_dir, keep_until_step=start_step if resume else None),
            "wandb": lambda: Wandb(
                project_name=project_name,
                experiment_name=experiment_name,
                run_dir=run_dir,
                config=config,
                resume_step=start_step if resume else None,
            ),
        }
        # In this order: wandb reads the metrics.jsonl that JsonLines has just cut to length.
        for name in LOGGERS:
            if name not in loggers:
                continue
            try:
                self._trackers[name] = start[name]()
            except Exception as error:
                self.close(failed=True)
                rule = f"{name} cannot start: {error} (leave {name} out to train without it)"
                raise ConfigError("trainer.logger", rule, list(loggers)) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Report a step: once per step, steps ascending.

        On a resumed run the step of the checkpoint itself is accepted and dropped (it is already on
        file), so that validation before the first step need not know.
        """
        check_names(metrics)
        if step > self._kept_step:
            assert step > self._last_step, f"step {step} is reported after step {self._last_step}"
            self._last_step = step
            numbers = {name: float(value) for name, value in metrics.items()}
            self._each(lambda tracker: tracker.log(numbers, step))

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        """Keep sample answers. Call it before log() of the same step."""
        if samples and step > self._kept_step:
            self._each(lambda tracker: tracker.log_generations(samples, step))

    def close(self, *, failed: bool = False) -> None:
        """Finish every tracker. Harmless when repeated."""
        self._each(lambda tracker: tracker.close(failed=failed))
        self._trackers.clear()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # whatever a tracker's library raises, training goes on
                if name not in self._warned:
                    self._warned.add(name)
                    reason = f"{type(error).__name__}: {error}"
                    logger.warning("trainer.logger: %s failed, training goes on without its rows: %s", name, reason)


class Console:
    """A progress bar; without a terminal, a line every few seconds instead."""

    def __init__(self, *, total_steps: int, start_step: int, stream: TextIO | None = None):
        self._stream = sys.stderr if stream is None else stream
        self._total = total_steps
        self._start = start_step
        self._started = time.monotonic()
        self._last_line = -math.inf
        self._bar: tqdm | None = None
        if self._stream.isatty() and _has_width(self._stream):
            self._bar = tqdm(
                total=total_steps, initial=start_step, desc="step", unit="step", file=self._stream, dynamic_ncols=True
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        summary = self._summary(metrics)
        accuracy = metrics.get("val/accuracy")
        if self._bar is not None:
            if accuracy is not None:
                self._bar.write(f"step {step}: held-out accuracy {accuracy:.1%}", file=self._stream)
            self._bar.set_postfix_str(summary, refresh=False)
            self._bar.update(step - self._bar.n)
            self._bar.refresh()
            return
        now = time.monotonic()
        if accuracy is None and step < self._total and now - self._last_line < PLAIN_LINE_SECONDS:
            return
        self._last_line = now
        parts = [f"step {step}/{self._total}", summary]
        if accuracy is not None:
            parts.append(f"held-out accuracy {accuracy:.1%}")
        if self._start < step < self._total:
            left = (now - self._started) / (step - self._start) * (self._total - step)
            parts.append(f"{tqdm.format_interval(round(left))} left")
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        """Nothing: they are long, and in generations.jsonl."""

    def close(self, *, failed: bool) -> None:
        if self._bar is not None:
            self._bar.close()

    @staticmethod
    def _summary(metrics: Mapping[str, float]) -> str:
        parts = []
        if "actor/kl_loss" in metrics:
            parts.append(f"KL {metrics['actor/kl_loss']:.4f}")
        elif "reward/mean" in metrics:
            parts.append(f"reward {metrics['reward/mean']:.4f}")
        if "perf/tokens_per_second" in metrics:
            parts.append(f"{metrics['perf/tokens_per_second']:.0f} tokens/s")
        return "  ".join(parts)


def _has_width(stream: TextIO) -> bool:
    """False for a terminal of no columns, as a recorder or a container may offer: tqdm would show nothing."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:  # not a real terminal; tqdm takes a width of its own
        return True


class JsonLines:
    """metrics.jsonl with one object per step, generations.jsonl with one object per sample answer.

    A value that is not finite becomes the string "NaN", "Infinity" or "-Infinity": JSON has no number
    for it, null would not say which, and float() reads the string back.
    """

    def __init__(self, run_dir: Path, *, keep_until_step: int | None):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = _JsonLinesFile(run_dir / "metrics.jsonl", keep_until_step)
        try:
            self._generations = _JsonLinesFile(run_dir / "generations.jsonl", keep_until_step)
        except BaseException:
            self._metrics.close()
            raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._metrics.append([{"step": step, **metrics}])

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        self._generations.append([{"step": step, **asdict(sample)} for sample in samples])

    def close(self, *, failed: bool) -> None:
        self._metrics.close()
        self._generations.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl or generations.jsonl; a line cut short by a crash is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


class _JsonLinesFile:
    """Append-only, each row written through to the system at once, never a part of a row left behind."""

    def __init__(self, path: Path, keep_until_step: int | None):
        if path.exists():
            if keep_until_step is None:
                _move_aside(path)
            else:
                kept = [row for row in read_rows(path) if row["step"] <= keep_until_step]
                temporary = path.with_name(path.name + ".tmp")
                temporary.write_bytes(_encode(kept))
                temporary.replace(path)
        self._file = path.open("ab", buffering=0)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        data = memoryview(_encode(rows))
        start = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(start)
            raise

    def close(self) -> None:
        self._file.close()


def _encode(rows: Sequence[Mapping[str, Any]]) -> bytes:
    def finite(value: Any) -> Any:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

    lines = [json.dumps({name: finite(value) for name, value in row.items()}, ensure_ascii=False) for row in rows]
    # A lone surrogate, which a tokenizer may decode to, has no UTF-8 form.
    return "".join(line + "\n" for line in lines).encode("utf-8", errors="replace")


def _move_aside(path: Path) -> None:
    number = 1
    while (older := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(older)
    logger.warning("%s is from an earlier run; kept as %s", path, older.name)


class Wandb:
    """A run in Weights & Biases, offline where nobody is logged in.

    A resumed run continues the run it had before. Online, the server keeps the steps it already has.
    Offline, wandb cannot continue a run, and syncing a second folder with the same id replaces the
    first: so the new folder starts with the steps that metrics.jsonl has kept.
    """

    def __init__(
        self,
        *,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resume_step: int | None,
    ):
        # Not at the top of the file: it takes a second, and a run that does not use it need not have it.
        import wandb

        def say(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        self._wandb = wandb
        self._samples: list[list[Any]] = []
        run_dir.mkdir(parents=True, exist_ok=True)
        offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun") or not (
            "WANDB_MODE" in os.environ or _has_wandb_login(wandb.setup().settings.base_url)
        )
        id_file = run_dir / "wandb_run_id"
        history = run_dir / "metrics.jsonl"
        resumes = resume_step is not None and id_file.exists() and (not offline or history.exists())
        self._run = wandb.init(
            project=project_name,
            name=experiment_name,
            dir=str(run_dir),
            config=dict(config),
            id=id_file.read_text().strip() if resumes else None,
            resume="allow" if resumes and not offline else None,
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True, console="off", finish_timeout=WANDB_FINISH_SECONDS),
        )
        try:
            id_file.write_text(self._run.id + "\n")
            if offline:
                say(f"wandb is offline; to see the run in a browser: wandb sync {self._run.settings.sync_dir}")
                for row in read_rows(history) if resumes else []:
                    step = row.pop("step")
                    self._run.log({name: float(value) for name, value in row.items()}, step=step, commit=True)
            elif self._run.url:
                say(f"wandb run: {self._run.url}")
        except BaseException:
            self.close(failed=True)
            raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # commit=True: otherwise the dashboard shows a step only when the next one arrives.
        self._run.log({**metrics, **self._take_samples()}, step=step, commit=True)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        # Kept for log(), because wandb takes nothing more of a step that is committed.
        self._samples += [[step, s.prompt, s.response, s.answer, s.reward] for s in samples]

    def close(self, *, failed: bool) -> None:
        try:
            if self._samples:
                self._run.log(self._take_samples())
            self._run.finish(exit_code=1 if failed else 0)
        finally:
            # Ends the process that wandb started beside ours. wandb exits with that one's code, which is not this run's
            # where a signal has ended both.
            try:
                self._wandb.teardown(exit_code=1 if failed else 0)
            except SystemExit as error:
                if error.code == 128 + signal.SIGTERM:  # this process's own handler, at this very moment
                    raise

    def _take_samples(self) -> dict[str, Any]:
        rows, self._samples = self._samples, []
        columns = ["step", "prompt", "response", "answer", "reward"]
        return {"val/generations": self._wandb.Table(columns=columns, data=rows)} if rows else {}


def _has_wandb_login(server: str) -> bool:
    """Whether wandb would find credentials for a server: in the environment, or where `wandb login` puts them."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server).netloc
    # The public service goes by several names, and wandb takes the login of one for the others.
    hosts = WANDB_PUBLIC_HOSTS if host in WANDB_PUBLIC_HOSTS else (host,)
    try:
        logins = netrc.netrc(os.path.expanduser(os.environ.get("NETRC", "~/.netrc")))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(name) is not None for name in hosts)

"""Weights & Biases."""

from __future__ import annotations

import logging
import netrc
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from hybrid_gkd.files import read_json_lines
from hybrid_gkd.types import Generation, RunInfo
from hybrid_gkd.waiting import Timeout, waiting

logger = logging.getLogger(__name__)

WANDB_FINISH_SECONDS = 300.0
"""How long the end of a run waits for uploads; what is missing then can be sent with `wandb sync`."""
WANDB_PUBLIC_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


class Wandb:
    """A run in Weights & Biases, offline where nobody is logged in.

    A resumed run continues the run it had before; online, the server keeps the steps it already has. Offline, wandb
    cannot, and syncing a second folder with the same id replaces the first: so that starts with metrics.jsonl's steps.
    """

    def __init__(self, info: RunInfo):
        import wandb  # takes a second, and may be missing

        self._wandb = wandb
        self._samples: list[list[Any]] = []
        offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        if "WANDB_MODE" not in os.environ:
            offline = not _has_wandb_login(wandb.setup().settings.base_url)
        id_file = info.run_dir / "wandb_run_id"
        history = info.run_dir / "metrics.jsonl"
        resumes = info.resume and id_file.exists() and (not offline or history.exists())
        settings = wandb.Settings(silent=True, console="off", finish_timeout=WANDB_FINISH_SECONDS)
        with waiting("wandb to start"):
            self._run = wandb.init(
                project=info.project_name, name=info.experiment_name, dir=str(info.run_dir), config=dict(info.config),
                id=id_file.read_text().strip() if resumes else None, mode="offline" if offline else None,
                resume="allow" if resumes and not offline else None, settings=settings,
            )
        try:
            id_file.write_text(self._run.id + "\n")
            if offline:
                path = self._run.settings.sync_dir
                logger.info("wandb is offline; to see the run in a browser: wandb sync %s", path)
                for row in read_json_lines(history) if resumes else []:
                    self._run.log(row, step=row.pop("step"), commit=True)
            elif self._run.url:
                logger.info("wandb run: %s", self._run.url)
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
            with waiting("wandb to upload what is left", Timeout(WANDB_FINISH_SECONDS)):
                self._run.finish(exit_code=1 if failed else 0)
        finally:
            # Ends wandb's own process, and exits with its code, which is not this run's where a signal has ended both.
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

"""Tracker for Weights & Biases."""

from __future__ import annotations

import logging
import netrc
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hybrid_gkd.config.loading import load_config
from hybrid_gkd.reporting.report.command import write
from hybrid_gkd.reporting.report.page import REPORT
from hybrid_gkd.runtime.files import read_json_lines
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.types import GENERATION_COLUMNS, Generation, RunInfo

logger = logging.getLogger(__name__)

WANDB_FINISH_SECONDS = 300.0
"""Timeout of uploads at the end of a run; `wandb sync` can send the rest later."""
BEST = {
    "val/accuracy": "max", "val/reward_model": "max", "val/forward_kl": "min", "val/reverse_kl": "min",
    "reward/mean": "max", "actor/kl_loss": "min",
}  # fmt: skip
"""Metrics whose best value is shown besides the last one in the list of runs."""
WANDB_PUBLIC_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


class Wandb:
    """Logs to Weights & Biases, offline without a login.

    A resumed run continues its wandb run. Online, the server keeps the earlier steps. Offline, syncing a second folder
    with the same id replaces the first one, so the new folder starts with the steps of metrics.jsonl.
    """

    def __init__(self, info: RunInfo):
        import wandb  # optional dependency; the import takes a second

        self._wandb, self._samples_are_new, self._run_dir = wandb, False, info.run_dir
        section = info.config["trainer"]["wandb"]
        offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        if "WANDB_MODE" not in os.environ:
            offline = not has_wandb_login(wandb.setup().settings.base_url)
        id_file = info.run_dir / "wandb_run_id"
        history = info.run_dir / "metrics.jsonl"
        resumes = info.resume and id_file.exists() and (not offline or history.exists())
        settings = wandb.Settings(silent=True, console="off", finish_timeout=WANDB_FINISH_SECONDS)
        with waiting("wandb to start"):
            self._run = wandb.init(
                project=info.project_name,
                name=info.experiment_name,
                dir=str(info.run_dir),
                config=dict(info.config),
                id=id_file.read_text(encoding="utf-8").strip() if resumes else None,
                mode="offline" if offline else None,
                resume="allow" if resumes and not offline else None,
                settings=settings,
                entity=section["entity"],
                group=section["group"],
                tags=section["tags"] or None,
                notes=section["notes"],
            )
        self._offline, self._logs_report = offline, False
        try:
            id_file.write_text(self._run.id + "\n", encoding="utf-8")
            for name, best in BEST.items():
                self._run.define_metric(name, summary=f"last,{best}")
            # One growing table; a resumed run's starts with the earlier samples.
            self._samples = wandb.Table(columns=list(GENERATION_COLUMNS), log_mode="INCREMENTAL")
            for row in read_json_lines(info.run_dir / "generations.jsonl") if resumes else []:
                self._samples.add_data(*(row.get(name) for name in GENERATION_COLUMNS))
            if offline:
                path = self._run.settings.sync_dir
                logger.info("wandb is offline; to view the run in a browser: wandb sync %s", path)
                for row in read_json_lines(history) if resumes else []:
                    self._run.log(row, step=row.pop("step"), commit=True)
            elif self._run.url:
                logger.info("wandb run: %s", self._run.url)
                if section["workspace"]:
                    arguments = (self._run.entity, self._run.project, info.run_dir, info.device)
                    threading.Thread(target=create_workspace, args=arguments, name="workspace", daemon=True).start()
            self._logs_report = section["log_report"]
        except BaseException:
            self.close(failed=True)
            raise

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        # commit=True: otherwise the dashboard shows a step only after the next one.
        self._run.log({**metrics, **self._take_samples()}, step=step, commit=True)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        # Kept for log(), because wandb rejects further data of a committed step.
        for sample in samples:
            self._samples.add_data(step, *asdict(sample).values())
        self._samples_are_new = True

    def close(self, *, failed: bool) -> None:
        try:
            if self._samples_are_new:
                self._run.log(self._take_samples())
            if self._logs_report:
                self._log_report()
            with waiting("wandb to finish uploads", Timeout(WANDB_FINISH_SECONDS)):
                self._run.finish(exit_code=1 if failed else 0)
        finally:
            # Teardown stops wandb's process and exits with its code, which is wrong if a signal stopped both.
            try:
                self._wandb.teardown(exit_code=1 if failed else 0)
            except SystemExit as error:
                if error.code == 128 + signal.SIGTERM:  # raised by this process's own signal handler
                    raise

    def _log_report(self) -> None:
        """Write a report and log it as an artifact; errors are logged as warnings."""
        try:
            # In the sync folder wandb does not copy it, and an offline run keeps it for `wandb sync`.
            page = write([self._run_dir], Path(self._run.settings.sync_dir) / REPORT)
            artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report")
            artifact.add_file(str(page), policy="immutable")
            logged = self._run.log_artifact(artifact)
            if not self._offline:
                with waiting("wandb to upload the report", Timeout(WANDB_FINISH_SECONDS)):
                    logged.wait(round(WANDB_FINISH_SECONDS))
        except Exception as error:  # errors of wandb, the network or the disk must not fail the run
            logger.warning("trainer.wandb.log_report: cannot log the report: %s: %s", type(error).__name__, error)

    def _take_samples(self) -> dict[str, Any]:
        is_new, self._samples_are_new = self._samples_are_new, False
        return {"val/generations": self._samples} if is_new else {}


def create_workspace(entity: str, project: str, run_dir: Path, device: str) -> None:
    """Create the workspace of the project if it has none; runs in a background thread."""
    try:
        from hybrid_gkd.reporting.dashboard import save_workspace

        run = load_config([f"trainer.device={device}"], config_name="config", config_path=run_dir)
        address = save_workspace(entity, project, run, update=False)
        if address is not None:
            logger.info("wandb workspace of the project %s: %s", project, address)
    except Exception as error:  # errors of the dashboard must not fail the run
        logger.warning(
            "cannot create the wandb workspace: %s: %s; create it later with python -m hybrid_gkd.reporting.dashboard "
            "--project %s --entity %s (trainer.wandb.workspace=false disables it)", type(error).__name__, error,
            project, entity,
        )  # fmt: skip


def has_wandb_login(server: str) -> bool:
    """Return whether wandb has credentials for a server, in the environment or from `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server).netloc
    # The public service has several host names, and wandb accepts the login of one for the others.
    hosts = WANDB_PUBLIC_HOSTS if host in WANDB_PUBLIC_HOSTS else (host,)
    try:
        logins = netrc.netrc(os.path.expanduser(os.environ.get("NETRC", "~/.netrc")))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(name) is not None for name in hosts)

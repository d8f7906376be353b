"""Ray and the workers' processes, begun before the checks of a run: their imports take as long as the checks do.

They load and write nothing before `WorkerGroup` tells them to begin, and are stopped where a check fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from hybrid_gkd.config import Config
from hybrid_gkd.errors import HybridGKDError
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.inputs import check_presence
from hybrid_gkd.launch.preflight import device
from hybrid_gkd.runtime.imports import quick_imports
from hybrid_gkd.student.checkpoint_store import CheckpointStore
from hybrid_gkd.workers.cluster import place_workers, ray_cluster, stop_workers
from hybrid_gkd.workers.own_cluster import remove_session, session_folder
from hybrid_gkd.workers.pool import Pool

logger = logging.getLogger(__name__)


class Ahead:
    """What was begun, until the run takes it."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        """Empty where nothing was begun."""
        self._session: Path | None = None
        """Ray's own folder, as long as nobody needs it."""

    def begin(self, config: Config, stack: contextlib.ExitStack) -> None:
        """Start Ray and the workers' processes, which import their packages then. Raises HybridGKDError."""
        facts = Facts(config)
        check_presence(config)  # a misspelt path is said without waiting for Ray
        device(facts)
        # Ray's processes are waited for. They are started by the main thread, since signals reach no other.
        importing = threading.Thread(target=import_transformers, name="import transformers", daemon=True)
        importing.start()
        stack.callback(self._remove_session)  # after Ray has ended
        try:
            stack.enter_context(ray_cluster(config, facts.device))
            self._session = session_folder()
            pools = place_workers(config, facts.device)
            stack.callback(stop_workers, pools)
            for pool in pools:
                pool.start("import_packages")  # whatever it raises, `initialize` will
        finally:
            importing.join()  # so that no two threads import parts of one package
        self.pools = pools
        logger.debug("Ray and the processes of %d worker(s) have begun", sum(pool.size for pool in pools))

    def take(self) -> list[Pool]:
        """The checks have passed: the run goes on with these, and what Ray writes is kept."""
        self._session = None
        return self.pools

    def _remove_session(self) -> None:
        """What Ray has written, unless the run has taken it."""
        if self._session is not None:
            remove_session(self._session)


def import_transformers() -> None:
    """What the checks use of it; Ray imports none of that."""
    with quick_imports():
        from transformers import (  # noqa: F401
            AutoConfig,
            AutoModelForCausalLM,
            AutoTokenizer,
            GenerationConfig,
            modeling_utils,
        )


@contextlib.contextmanager
def started_ahead(config: Config) -> Iterator[Ahead]:
    """Begin what the run will need, where it is sure to need it; it ends with the block.

    What cannot be started is not said here: the checks may have the reason, and the run starts it again after them.
    """
    ahead = Ahead()
    with contextlib.ExitStack() as stack:
        if is_needed(config):
            with contextlib.ExitStack() as beginning:
                try:
                    ahead.begin(config, beginning)
                except HybridGKDError as error:
                    logger.debug("nothing is started before the checks: %s", error)
                else:
                    stack.push(beginning.pop_all())
        yield ahead


def is_needed(config: Config) -> bool:
    """Whether the run has its own Ray on this machine, and steps to do by all that is known before the checks."""
    trainer = config.trainer
    if config.ray_init.address is not None:
        return False
    if trainer.val_only or trainer.resume_mode == "disable":
        return True
    if trainer.resume_from_path is not None:
        return False
    latest, steps = CheckpointStore(config.experiment_dir, keep=None).latest(), trainer.total_training_steps
    return latest is None or (steps is not None and int(latest.name.rpartition("_")[2]) < steps)

"""Train; after the loss of workers, build their pool again within the run and resume from the newest saved state.

Ray, the teachers and an intact separate pool are kept. `supervise.py` starts the whole run again after other faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_gkd.errors import CheckpointError, WorkerError
from hybrid_gkd.launch.checks import Facts
from hybrid_gkd.launch.resume import Resumption, check_checkpoint
from hybrid_gkd.launch.stopping import Stopping
from hybrid_gkd.ppo.trainer import PPOTrainer
from hybrid_gkd.reporting.starts import append_row, lost_work, reliability
from hybrid_gkd.runtime.imports import freeze_gc
from hybrid_gkd.runtime.processes import wait_for_processes
from hybrid_gkd.runtime.waiting import Timeout, waiting
from hybrid_gkd.student.checkpoint_store import load_state, remove_snapshots
from hybrid_gkd.workers.cluster import stop_workers
from hybrid_gkd.workers.liveness import RayLost
from hybrid_gkd.workers.pool import Pool

logger = logging.getLogger(__name__)

Build = Callable[[Facts, contextlib.ExitStack, list[Pool]], PPOTrainer]
ENDING_SECONDS = 30.0
"""Timeout for lost workers on this machine to end and free their memory."""


def fit_with_restarts(
    facts: Facts, stack: contextlib.ExitStack, stopping: Stopping,
    build: Build, is_ready: Callable[[], None],
) -> PPOTrainer:  # fmt: skip
    """Train and return the trainer; replace lost workers, at most `trainer.max_restarts` times.

    Args:
        facts: results of the checks, with the checkpoint to resume from.
        stack: closing it stops the last workers.
        build: starts the workers, except those of the given pools, and returns their trainer; closing the given stack
            stops them all.
        is_ready: called when the first workers are ready.

    Raises the errors of `build` and `PPOTrainer.fit`; CheckpointError: the states to restart from are damaged.
    """
    config, failures = facts.config, list[int]()
    # Without checkpoints, finishing the current step would save nothing.
    saves = config.trainer.save_freq != 0 and not config.trainer.val_only
    kept = list[Pool]()
    while True:
        trainer, own = build_with(kept, build, facts, stack)
        take_snapshots(trainer)
        freeze_gc()
        is_ready()
        trainer.constant_metrics = reliability(config.run_dir)
        try:
            with stopping.deferred_to_step_end(config.trainer.grace_period if saves else 0.0):
                trainer.fit()
                if trainer.step == trainer.total_steps:
                    stopping.cancel_request()
            break
        except WorkerError as error:
            failures.append(trainer.step + 1)
            if stopping.requested() or not may_restart(error, failures, config.trainer.max_restarts):
                raise
            facts = dataclasses.replace(facts, resumption=newest_intact(trainer.saving.newest_states()))
            row = describe(error, trainer.step + 1, facts)
        place = "the start" if facts.resumption is None else facts.resumption.folder
        logger.warning(
            "restart %d of %d from %s, since step %d has failed: %s", len(failures), config.trainer.max_restarts,
            place, row["failed_step"], row["reason"],
        )  # fmt: skip
        is_ready = functools.partial(record, config.run_dir, row)
        kept = trainer.group.keep_usable(actors=facts.resumption is not None)
        stack.callback(stop_workers, kept)
        placements, store = trainer.group.placements, trainer.store
        own.close()
        host = socket.gethostname()
        with waiting(f"lost workers on {host} to end", Timeout(ENDING_SECONDS)):
            wait_for_processes({place.pid for place in placements if place.host == host}, ENDING_SECONDS)
        store.reserve()
        gc.unfreeze()  # the trainer of the lost workers
    if trainer.step in (trainer.total_steps, trainer.saving.step):
        remove_snapshots(config.run_dir)
    return trainer


def build_with(
    kept: list[Pool], build: Build, facts: Facts, stack: contextlib.ExitStack
) -> tuple[PPOTrainer, contextlib.ExitStack]:
    """Return a trainer and the stack that stops its workers; build all pools again if the kept ones cannot be used."""
    own = stack.enter_context(contextlib.ExitStack())
    try:
        return build(facts, own, kept), own
    except WorkerError as error:
        if not kept or isinstance(error, RayLost):
            raise
        logger.warning("all workers are built again: %s", error)
        own.close()
    return build_with([], build, facts, stack)


def take_snapshots(trainer: PPOTrainer) -> None:
    """Enable snapshots if configured. Remove those of earlier runs, unless the trainer resumed from one."""
    if trainer.saving.snapshot is None:
        remove_snapshots(trainer.store.run_dir)
    if trainer.config.takes_snapshots and trainer.group.saves_in_background:
        trainer.take_snapshots()


def may_restart(error: WorkerError, failures: list[int], most: int) -> bool:
    """Return whether the workers may be replaced. `failures`: steps that failed, the newest failure last."""
    if most == 0 or isinstance(error, RayLost):
        return False
    repeats = failures[-2:-1] == failures[-1:]
    if repeats or len(failures) > most:
        limit = f"there were {most} restarts (trainer.max_restarts)"
        why = f"step {failures[-1]} has failed twice" if repeats else limit
        logger.error("the workers are not replaced: %s", why)
        return False
    return True


def newest_intact(states: list[tuple[int, Path]]) -> Resumption | None:
    """Return the first intact checkpoint; None if there are none. Raises CheckpointError: all are damaged."""
    damaged: CheckpointError | None = None
    for _, folder in states:
        try:
            return Resumption(folder, load_state(folder), check_checkpoint(folder, steps=sys.maxsize))
        except CheckpointError as error:
            logger.warning("skipped: %s", error)
            damaged = error
    if damaged is not None:
        raise damaged
    return None


def describe(error: WorkerError, step: int, facts: Facts) -> dict[str, Any]:
    """Return the row of starts.jsonl about a restart from the state of `facts` after a failure of `step`."""
    reason = f"{type(error).__name__}: {error}"
    lost = lost_work(facts.config.run_dir, facts.steps_done)
    return {"restart": time.time(), "failed_step": step, "reason": reason, "resumed_step": facts.steps_done, **lost}


def record(run_dir: Path, row: dict[str, Any]) -> None:
    """Append the row of a restart whose workers are ready."""
    append_row(run_dir, {**row, "seconds_down": time.time() - row["restart"]})
